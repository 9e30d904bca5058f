"""Where pods run: nodes by accelerator, stock, quota and reservations, preemption."""

from __future__ import annotations

import urllib.error
from pathlib import Path
from typing import Any

import pytest

from .conftest import Kube, ended

GPU = "nvidia.com/gpu"
TYPE = "cloud.google.com/gke-accelerator"


def gpu(count: int, accelerator: str = "nvidia-l4", **selectors: str) -> dict[str, Any]:
    """The part of a pod's spec that requests GPUs."""
    labels = {key.replace("__", "/").replace("_", "-"): value for key, value in selectors.items()}
    container = {"resources": {"limits": {GPU: str(count)}}}
    return {"container": container, "nodeSelector": {TYPE: accelerator, **labels}}


def unscheduled(pod: Any) -> str:
    condition = next((item for item in pod.status.conditions or [] if item.type == "PodScheduled"), None)
    return condition.message if condition is not None and condition.status == "False" else ""


def wait_unscheduled(kube: Kube, name: str, text: str) -> dict[str, str]:
    kube.until(lambda: unscheduled(kube.pod(name)), lambda message: text in message)
    return dict(kube.events(name))


def test_nodes_exist_as_long_as_pods_need_them(kube: Kube, tmp_path: Path) -> None:
    selectors = {"cloud.google.com__gke_spot": "true", "cloud.google.com__gke_gpu_driver_version": "latest"}
    kube.create_pod("a", "wait-for", str(tmp_path / "seen"), **gpu(2, **selectors))
    pod = kube.wait_pod("a", "Running")
    node = kube.core.read_node(pod.spec.node_name)
    assert (node.metadata.labels["cloud.google.com/gke-spot"], node.status.allocatable[GPU]) == ("true", "2")
    assert "TriggeredScaleUp" in dict(kube.events("a"))
    (tmp_path / "seen").touch()
    kube.wait_pod("a", "Succeeded")
    path = f"/api/v1/nodes/{pod.spec.node_name}"
    kube.until(lambda: kube.call("GET", path)[0], lambda code: code == 404)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"nodeSelector": {"disktype": "ssd"}}, "didn't match Pod's node affinity/selector"),
        (gpu(1, "nvidia-unknown"), "didn't match Pod's node affinity/selector"),
        (gpu(9, "nvidia-b200"), "Insufficient nvidia.com/gpu"),
        (
            {
                "container": {"resources": {"limits": {"cpu": "500"}}},
                "nodeSelector": {"cloud.google.com/compute-class": "Performance"},
            },
            "Insufficient cpu",
        ),
        ({"container": {"resources": {"limits": {"google.com/tpu": "4"}}}}, "Insufficient google.com/tpu"),
    ],
)
def test_pod_that_fits_no_node_stays_pending(kube: Kube, spec: dict[str, Any], text: str) -> None:
    kube.create_pod("a", **spec)
    events = wait_unscheduled(kube, "a", text)
    assert text in events["FailedScheduling"]
    assert "NotTriggerScaleUp" in dict(kube.until(lambda: kube.events("a"), lambda events: len(events) >= 2))
    assert kube.pod("a").status.phase == "Pending"


def test_pod_starts_after_a_stock_out(kube: Kube) -> None:
    kube.faults(stockout=["nvidia-l4"])
    kube.create_pod("a", **gpu(1))
    events = wait_unscheduled(kube, "a", "Insufficient nvidia.com/gpu")
    zones = "Node scale up in zones us-central1-a, us-central1-b associated with this pod failed"
    assert events["FailedScaleUp"].startswith(f"{zones}: GCE out of resources. ")
    kube.faults(stockout=[])
    kube.wait_pod("a", "Succeeded")


def test_capacity_is_shared_and_freed(kube: Kube) -> None:
    kube.create_pod("a", "sleep", "600", **gpu(4))  # all L4s of the test cluster
    kube.wait_pod("a", "Running")
    kube.create_pod("b", **gpu(1))
    events = wait_unscheduled(kube, "b", "Insufficient nvidia.com/gpu")
    assert "GCE out of resources" in events["FailedScaleUp"]
    kube.core.delete_namespaced_pod("a", kube.namespace, grace_period_seconds=0)
    kube.wait_pod("b", "Succeeded")


def test_exceeded_quota_is_reported(kube: Kube) -> None:
    kube.faults(quota={"nvidia-b200": 4})
    kube.create_pod("a", **gpu(8, "nvidia-b200"))
    assert "GCE quota exceeded" in wait_unscheduled(kube, "a", "Insufficient")["FailedScaleUp"]
    kube.faults(quota={})
    kube.wait_pod("a", "Succeeded")


def test_reservations_have_to_exist(kube: Kube) -> None:
    for name, reservation in (("a", "known"), ("b", "unknown")):
        kube.create_pod(name, **gpu(1, "nvidia-b200", cloud_google_com__x="y") | {"nodeSelector": {
            TYPE: "nvidia-b200", "cloud.google.com/reservation-name": reservation,
            "cloud.google.com/reservation-affinity": "specific",
        }})  # fmt: skip
    kube.wait_pod("a", "Succeeded")
    assert "'unknown' not found" in wait_unscheduled(kube, "b", "Insufficient")["FailedScaleUp"]


def test_preempted_pods_get_sigterm_and_fail(kube: Kube) -> None:
    kube.create_pod("a", "polite", "75", terminationGracePeriodSeconds=30, **gpu(1))
    kube.until(lambda: kube.pod("a").status.phase == "Running" and kube.log("a"), lambda log: log and "waiting" in log)
    node = kube.pod("a").spec.node_name
    kube.faults(preempt={"pod": f"{kube.namespace}/a"})
    pod = kube.wait_pod("a", "Failed")
    target = next(item for item in pod.status.conditions if item.type == "DisruptionTarget")
    assert (target.status, target.reason, pod.status.reason) == ("True", "TerminationByKubelet", "Terminated")
    assert pod.status.container_statuses[0].state.terminated.exit_code == 75
    assert "checkpoint" in kube.log("a")
    kube.until(lambda: kube.call("GET", f"/api/v1/nodes/{node}")[0], lambda code: code == 404)


def test_preemption_does_not_fail_the_job(kube: Kube, tmp_path: Path) -> None:
    rule = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    kube.create_job("a", "wait-for", str(tmp_path / "preempted"), podFailurePolicy={"rules": [rule]})
    first = kube.until(kube.pods, lambda pods: pods and pods[0].status.phase == "Running")[0]
    kube.faults(preempt={"node": first.spec.node_name})
    kube.until(kube.pods, lambda pods: len(pods) == 2)
    (tmp_path / "preempted").touch()
    job = kube.wait_job("a")
    assert (ended(job).type, job.status.failed, job.status.succeeded) == ("Complete", None, 1)
    assert len(kube.pods()) == 2


def test_evicted_pods_report_the_reason(kube: Kube) -> None:
    kube.create_pod("a", "sleep", "600")
    node = kube.wait_pod("a", "Running").spec.node_name
    kube.faults(evict={"pod": f"{kube.namespace}/a"})
    pod = kube.wait_pod("a", "Failed")
    assert (pod.status.reason, pod.status.message) == ("Evicted", "The node was low on resource: memory.")
    assert "Evicted" in dict(kube.events("a"))
    assert kube.call("GET", f"/api/v1/nodes/{node}")[0] == 200


@pytest.mark.parametrize(
    "switches",
    [{"stockout": 5}, {"quota": []}, {"preempt": "x"}, {"evict": {"pod": "no/such"}}, {"preempt": {"node": "none"}},
     {"fail_next": {"verb": "sing"}}, {"fail_next": {"resource": "x"}}, {"fail_next": {"code": 200}}, {"typo": 1}],
)  # fmt: skip
def test_invalid_switches_are_refused(kube: Kube, switches: dict[str, Any]) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        kube.faults(**switches)
    with refused.value as error:
        assert error.code in (400, 404)


def test_stubborn_pods_are_killed_with_their_node(kube: Kube) -> None:
    kube.create_pod("a", "stubborn", terminationGracePeriodSeconds=60)
    kube.until(lambda: kube.pod("a").status.phase == "Running" and kube.log("a"), lambda log: log and "ignoring" in log)
    kube.faults(preempt={"pod": f"{kube.namespace}/a"})
    pod = kube.wait_pod("a", "Failed")
    assert pod.status.container_statuses[0].state.terminated.exit_code == 137
