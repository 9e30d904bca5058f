"""Target `gke` without a cloud: the requests that it sends, and the states that it reads from Jobs, pods and events."""

from __future__ import annotations

import base64
import json
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.cloud import container_v1
from kubernetes import client

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud import kubernetes
from dropforge.money.plan import make_plan
from dropforge.platforms.gke import serve, workload
from dropforge.platforms.gke import train as gke
from dropforge.platforms.gke.catalog import GKE_DRIVER_VERSION, GKE_DRIVERS, GKE_GPUS
from dropforge.platforms.gke.requests import cluster_of, cluster_request, job_manifest, service_manifest
from dropforge.platforms.gke.status import status_of_job
from dropforge.platforms.gpus import GPUS
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import Launch, Phase, Status, Waits, class_of_exit
from dropforge.spec import JobSpec, parse_spec
from dropforge.stages.admission import budget_problems, deployment_problems, machine_problems
from dropforge_cli.deployment import placeholders

from ...deployments import cloud_with, settings_with
from ...schemas import kubernetes as kubernetes_schemas

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "gke-gemma-3-12b-fsdp.json"
MODELS: dict[str, Any] = {"Job": client.V1Job, "NetworkPolicy": client.V1NetworkPolicy, "Service": client.V1Service}
RUN = "text-to-sql-0123456789ab"
SETTINGS = settings_with(gke_cluster="standing", network="net", subnetwork="sub", nodes_service_account="nodes")
END = "2026-11-20T12:00:00Z"
FULL = {
    "accelerator": "nvidia-b200",
    "accelerator_count": 8,
    "nodes": 2,
    "cpu": 200,
    "memory_gib": 3000,
    "shared_memory_gib": 256,
    "placements": [
        {"region": "us-central1", "capacity": "reservation", "reservation": "a4"},
        {"region": "us-east4", "capacity": "flex_start"},
        {"region": "us-east4", "capacity": "spot"},
        {"region": "us-east4", "capacity": "on_demand"},
    ],
}


def spec(target: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    document = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": "owner/model-1b"},
        "dataset": {"source": "owner/data"},
        "target": {"type": "gke", "placements": [{"region": "us-central1"}], **(target or {})},
        "serve": None,
        **changes,
    }
    return parse_spec(json.dumps(document).encode())


def launch(target: dict[str, Any] | None = None, placement: int = 0, **changes: Any) -> Launch:
    deadline = datetime(2026, 11, 20, 14, tzinfo=UTC)
    return Launch(RUN, 2, placement, spec(target, **changes), SETTINGS, deadline, 7200, key="")


def pod_spec(launch: Launch) -> dict[str, Any]:
    return job_manifest(launch)["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def variables(launch: Launch) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in pod_spec(launch)["containers"][0]["env"]}


def check_strictly(manifest: dict[str, Any]) -> None:
    """Check by Kubernetes' schemas and by the client's models; both refuse unknown fields."""
    kubernetes_schemas.check(manifest)
    MODELS[manifest["kind"]].model_validate(manifest)


@pytest.mark.parametrize("placement", range(4))
@pytest.mark.parametrize("changes", [{}, {"secrets": {"HF_TOKEN": "hf-token"}, "labels": {"team": "a"}}])
def test_kubernetes_accepts_the_manifests(placement: int, changes: dict[str, Any]) -> None:
    for resource in gke.GkeJobs().resources(launch(FULL, placement, **changes)):
        check_strictly(resource.request)
    check_strictly(job_manifest(launch(**changes)))


def test_the_example_plans_to_valid_requests_with_a_price() -> None:
    plan = make_plan(parse_spec(EXAMPLE.read_bytes()), placeholders(), EXAMPLE.name)
    [placement] = plan.placements
    cluster, job = placement.resources
    assert container_v1.Cluster.from_json(json.dumps(cluster.request["cluster"]), ignore_unknown_fields=False)
    check_strictly(job.request)
    assert placement.price.usd_per_hour == pytest.approx(90.216 + 0.10)
    assert job.name.startswith(f"{cluster.name}/k8s/namespaces/")
    container = job.request["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "400Gi"}
    assert not budget_problems(plan.spec)


def test_each_kind_of_capacity_has_its_node_labels() -> None:
    common = {"cloud.google.com/gke-accelerator": "nvidia-b200", "cloud.google.com/gke-gpu-driver-version": "latest"}
    own: list[dict[str, str]] = [
        {"cloud.google.com/reservation-name": "a4", "cloud.google.com/reservation-affinity": "specific"},
        {"cloud.google.com/gke-flex-start": "true"},
        {"cloud.google.com/gke-spot": "true"},
        {},
    ]
    for placement, labels in enumerate(own):
        assert pod_spec(launch(FULL, placement))["nodeSelector"] == {**common, **labels}


def test_spot_pods_have_a_shorter_grace_period_and_may_be_evicted() -> None:
    spot, on_demand = launch(FULL, 2), launch(FULL, 3)
    assert pod_spec(spot)["terminationGracePeriodSeconds"] == 25
    assert variables(spot)["DROPFORGE_GRACE_SECONDS"] == "25"
    assert "annotations" not in job_manifest(spot)["spec"]["template"]["metadata"]
    assert variables(on_demand)["DROPFORGE_GRACE_SECONDS"] == "120"
    annotations = job_manifest(on_demand)["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


def test_the_job_tries_once_and_reports_how_a_pod_ended() -> None:
    job = job_manifest(launch())["spec"]
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    disrupted, exits = job["podFailurePolicy"]["rules"]
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert {64, 75, 137} <= set(exits["onExitCodes"]["values"])
    assert {disrupted["action"], exits["action"]} == {"FailJob"}
    assert job["activeDeadlineSeconds"] == 7200
    assert exits["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]


def test_the_kubelet_can_check_that_the_user_is_not_root() -> None:
    dockerfile = (ROOT / "containers" / "train_trl" / "Dockerfile").read_text()
    context = pod_spec(launch())["securityContext"]
    assert context["runAsNonRoot"]
    assert f"--uid {context['runAsUser']} " in dockerfile


def test_containers_find_the_driver_where_gke_mounts_it() -> None:
    """The variable replaces that of the image, so the image must have none, or the same folders."""
    images = tomllib.loads((ROOT / "tests" / "data" / "images.toml").read_text())
    assert "LD_LIBRARY_PATH" not in images["train_trl"]["env"] | images["serve_vllm"]["env"]
    assert variables(launch())["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    served = spec(serve={"type": "gke"})
    deployment = Deployment(RUN, served, SETTINGS, datetime(2026, 11, 21, tzinfo=UTC))
    manifest = workload.deployment_manifest(workload.own_workload(deployment))
    [server] = manifest["spec"]["template"]["spec"]["containers"]
    # vLLM's image has these two, in this order: https://github.com/vllm-project/vllm/pull/25766
    expected = {"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64:/usr/local/cuda/lib64"}
    assert expected in server["env"]


def test_several_nodes_are_an_indexed_job_behind_a_headless_service() -> None:
    two, single = launch(FULL), launch()
    service, job = service_manifest(two), job_manifest(two)["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert job["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    name = service["metadata"]["name"]
    assert variables(two)["DROPFORGE_MAIN_ADDRESS"] == f"{name}-0.{name}:29500"
    assert (variables(two)["DROPFORGE_NUM_MACHINES"], variables(two)["DROPFORGE_NUM_PROCESSES"]) == ("2", "8")
    assert [resource.kind for resource in gke.GkeJobs().resources(single)] == ["batch.k8s.io/Job"]
    assert not {"DROPFORGE_NUM_MACHINES", "DROPFORGE_MAIN_ADDRESS"} & variables(single).keys()


def test_the_manifest_contains_references_to_secrets_only() -> None:
    environment = variables(launch(secrets={"HF_TOKEN": "hf-token", "OTHER": "other:3"}))
    assert json.loads(environment["DROPFORGE_SECRETS"]) == {
        "HF_TOKEN": "projects/x/secrets/hf-token/versions/latest",
        "OTHER": "projects/x/secrets/other/versions/3",
    }
    assert "DROPFORGE_SECRETS" not in variables(launch())


def test_an_ephemeral_cluster_is_private_and_named_after_the_attempt() -> None:
    attempt = launch({"cluster": {"create": True}})
    request = cluster_request(attempt)
    cluster = container_v1.Cluster.from_json(json.dumps(request["cluster"]), ignore_unknown_fields=False)
    assert request["parent"] == "projects/x/locations/us-central1"
    assert cluster.name == f"df-{RUN}-a2"
    assert len(cluster.name) <= 40
    assert cluster.autopilot.enabled
    assert cluster.release_channel.channel == container_v1.ReleaseChannel.Channel.RAPID
    assert cluster.resource_labels["dropforge-run"] == RUN
    assert (cluster.network, cluster.subnetwork) == ("net", "sub")
    nodes = cluster.autoscaling.autoprovisioning_node_pool_defaults
    assert nodes.service_account == SETTINGS.nodes_service_account
    assert cluster.control_plane_endpoints_config.dns_endpoint_config.allow_external_traffic
    kinds = [resource.kind for resource in gke.GkeJobs().resources(attempt)]
    assert kinds == ["container.googleapis.com/Cluster", "batch.k8s.io/Job"]


def test_the_spec_names_the_standing_cluster_or_the_deployment_does() -> None:
    [job] = gke.GkeJobs().resources(launch({"cluster": {"name": "research"}}))
    assert "/clusters/research/" in job.name
    [job] = gke.GkeJobs().resources(launch())
    assert (
        job.name
        == f"projects/x/locations/us-central1/clusters/standing/k8s/namespaces/dropforge/batch/jobs/df-{RUN}-a2"
    )


def test_a_run_without_any_cluster_is_refused() -> None:
    bare = settings_with()
    [problem] = deployment_problems(spec(), bare)
    assert problem.pointer == "/target/cluster/name"
    assert not deployment_problems(spec(), SETTINGS)
    [problem] = deployment_problems(spec({"cluster": {"create": True}}), bare)
    assert problem.pointer == "/target/cluster/create"
    bare = replace(bare, nodes_service_account="nodes@x.iam.gserviceaccount.com")
    assert not deployment_problems(spec({"cluster": {"create": True}}), bare)
    serve = {"type": "gke"}
    [problem] = deployment_problems(spec({"cluster": {"create": True}}, serve=serve), bare)
    assert problem.pointer == "/serve/cluster"
    assert not deployment_problems(spec({"cluster": {"name": "research"}}, serve=serve), bare)


def test_labels_must_suit_kubernetes() -> None:
    problems = deployment_problems(spec(labels={"ok": "a_b-c", "empty": "", "bad-": "v", "key": "-v"}), SETTINGS)
    assert {problem.pointer for problem in problems} == {"/labels/bad-", "/labels/key"}


@pytest.mark.parametrize(
    ("target", "placement", "expected"),
    [
        (FULL, 0, 16 * 90.216 / 8),
        (FULL, 1, None),  # flex-start: no published price
        (FULL, 2, None),  # Spot: the price changes monthly
        (FULL, 3, None),  # not offered in this region
        ({"price_usd_per_hour": 2.5}, 0, 2.5),
        ({"price_usd_per_hour": 2.5, "cluster": {"create": True}}, 0, 2.6),
        ({}, 0, None),
        ({"accelerator": "nvidia-tesla-a100", "accelerator_count": 4}, 0, 4 * 3.67339),
    ],
)
def test_a_price_is_for_all_nodes_or_unknown(target: dict[str, Any], placement: int, expected: float | None) -> None:
    price = gke.GkeJobs().price(spec(target), placement)
    assert price.usd_per_hour == (expected if expected is None else pytest.approx(expected, abs=1e-3))
    assert price.source
    assert (price.as_of is None) is (expected is None or "price_usd_per_hour" in target)


def test_a_budget_needs_a_price() -> None:
    [problem] = budget_problems(spec(limits={"max_cost_usd": 5}))
    assert "target.price_usd_per_hour" in str(problem)


def job(*conditions: dict[str, str], **metadata: Any) -> dict[str, Any]:
    status = {"conditions": list(conditions)}
    return {"metadata": {"name": "j", "uid": "u", **metadata}, "spec": {}, "status": status}


def failed(reason: str = "BackoffLimitExceeded", message: str = "Job has reached the specified backoff limit") -> Any:
    return {"type": "Failed", "status": "True", "reason": reason, "message": message}


def pod(
    code: int | None = None, why: str = "Error", at: str = END, disruption: str = "", **status: Any
) -> dict[str, Any]:
    conditions = (
        [{"type": "DisruptionTarget", "status": "True", "reason": disruption, "message": "m"}] if disruption else []
    )
    state = {} if code is None else {"terminated": {"exitCode": code, "reason": why, "finishedAt": at}}
    container = {"name": "trainer", "image": "i", "state": state}
    return {
        "metadata": {"name": "p", "uid": "p"},
        "spec": {"nodeName": "n"},
        "status": {"phase": "Failed", "conditions": conditions, "containerStatuses": [container], **status},
    }


def waiting(reason: str, message: str = "", **changes: Any) -> dict[str, Any]:
    container = {"name": "trainer", "image": "i", "state": {"waiting": {"reason": reason, "message": message}}}
    return {
        "metadata": {"name": "p", "uid": "p"},
        "spec": {"nodeName": "n"},
        "status": {"phase": "Pending", "containerStatuses": [container]},
        **changes,
    }


UNSCHEDULED: dict[str, Any] = {
    "metadata": {"name": "p", "uid": "p"},
    "spec": {},
    "status": {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}],
    },
}


def event(reason: str, message: str, at: str = END) -> dict[str, str]:
    return {"reason": reason, "message": message, "lastTimestamp": at}


def status(manifest: dict[str, Any], pods: list[Any], *events: dict[str, str], nodes: int = 1) -> Status:
    return status_of_job(manifest, pods, nodes, lambda uid: list(events))


@pytest.mark.parametrize(
    ("pods", "expected", "code"),
    [
        ([pod(64)], ErrorClass.CONFIG, 64),
        ([pod(65)], ErrorClass.DATA, 65),
        ([pod(75)], ErrorClass.PREEMPTED, 75),
        ([pod(76)], ErrorClass.OUT_OF_MEMORY, 76),
        ([pod(1)], ErrorClass.CODE, 1),
        ([pod(137)], ErrorClass.INFRASTRUCTURE, 137),
        ([pod(137, "OOMKilled")], ErrorClass.OUT_OF_MEMORY, 137),
        ([pod(137, "ContainerStatusUnknown")], ErrorClass.INFRASTRUCTURE, 137),
        ([pod(137, disruption="TerminationByKubelet")], ErrorClass.PREEMPTED, 137),
        ([pod(75, disruption="EvictionByEvictionAPI")], ErrorClass.PREEMPTED, 75),
        ([pod(disruption="DeletionByTaintManager")], ErrorClass.INFRASTRUCTURE, None),
        ([pod(137, reason="Terminated", message="imminent node shutdown")], ErrorClass.PREEMPTED, 137),
        (
            [pod(137, disruption="TerminationByKubelet", reason="Evicted", message="low on resource: memory")],
            ErrorClass.OUT_OF_MEMORY,
            137,
        ),
        (
            [pod(reason="Evicted", message="Pod ephemeral local storage usage exceeds the total limit of 100Gi")],
            ErrorClass.CONFIG,
            None,
        ),
        ([pod(reason="Evicted", message="The node had condition: [DiskPressure].")], ErrorClass.INFRASTRUCTURE, None),
        ([pod(reason="UnexpectedAdmissionError", message="no GPU")], ErrorClass.INFRASTRUCTURE, None),
        ([pod(143), pod(70, at="2026-11-20T12:00:05Z")], ErrorClass.CODE, 70),
        ([pod(70, at="2026-11-20T12:00:05Z"), pod(65)], ErrorClass.DATA, 65),
    ],
)
def test_a_failed_job_is_explained_by_its_pods(pods: list[Any], expected: ErrorClass, code: int | None) -> None:
    for condition in (failed(), {**failed(), "type": "FailureTarget"}):
        outcome = status(job(condition), pods, nodes=len(pods))
        assert (outcome.phase, outcome.error_class, outcome.exit_code) == (Phase.FAILED, expected, code)
        assert outcome.message
        assert (outcome.ended is None) is (code is None)


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        ("DeadlineExceeded", "Job was active longer than specified deadline", ErrorClass.DEADLINE),
        (
            "PodFailurePolicy",
            "Pod ns/p has condition DisruptionTarget matching FailJob rule at index 0",
            ErrorClass.PREEMPTED,
        ),
        (
            "PodFailurePolicy",
            "Container trainer for pod ns/p failed with exit code 65 matching FailJob rule at index 1",
            ErrorClass.DATA,
        ),
        ("BackoffLimitExceeded", "Job has reached the specified backoff limit", ErrorClass.INFRASTRUCTURE),
    ],
)
def test_a_failed_job_explains_the_end_of_deleted_pods(reason: str, message: str, expected: ErrorClass) -> None:
    outcome = status(job(failed(reason, message)), [])
    assert (outcome.phase, outcome.error_class) == (Phase.FAILED, expected)


def test_every_exit_code_of_the_policy_has_its_class_without_a_pod() -> None:
    for code in job_manifest(launch())["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]:
        message = f"Container trainer for pod ns/p failed with exit code {code} matching FailJob rule at index 1"
        assert status(job(failed("PodFailurePolicy", message)), []).error_class is class_of_exit(code)


def test_a_complete_job_has_succeeded_and_a_deleted_one_is_gone() -> None:
    complete = {"type": "Complete", "status": "True"}
    assert status(job(complete), [pod(0, "Completed", phase="Succeeded")]) == Status(Phase.SUCCEEDED, exit_code=0)
    assert status(job(deletionTimestamp=END), [pod(phase="Running")]).phase is Phase.GONE


@pytest.mark.parametrize(
    ("pods", "events", "phase", "expected"),
    [
        ([], [], Phase.PENDING, ErrorClass.INFRASTRUCTURE),
        (
            [],
            [
                event(
                    "FailedCreate",
                    'pods "p" is forbidden: error looking up service account ns/a: serviceaccount "a" not found',
                )
            ],
            Phase.FAILED,
            ErrorClass.CONFIG,
        ),
        (
            [],
            [event("FailedCreate", 'pods "p" is forbidden: exceeded quota: gpus, requested: 8, used: 8, limited: 8')],
            Phase.PENDING,
            ErrorClass.QUOTA,
        ),
        (
            [],
            [event("FailedCreate", 'admission webhook "warden-validating" denied the request: GKE Warden rejected')],
            Phase.FAILED,
            ErrorClass.CONFIG,
        ),
        ([], [event("FailedCreate", "Internal error occurred: timeout")], Phase.PENDING, ErrorClass.INFRASTRUCTURE),
        ([UNSCHEDULED], [], Phase.PENDING, ErrorClass.STOCKOUT),
        (
            [UNSCHEDULED],
            [event("FailedScaleUp", "failed: GCE out of resources. Pod")],
            Phase.PENDING,
            ErrorClass.STOCKOUT,
        ),
        ([UNSCHEDULED], [event("FailedScaleUp", "failed: GCE quota exceeded. Pod")], Phase.PENDING, ErrorClass.QUOTA),
        (
            [UNSCHEDULED],
            [event("FailedScaleUp", "failed: GCE reservation 'x' not found")],
            Phase.FAILED,
            ErrorClass.CONFIG,
        ),
        ([waiting("ContainerCreating")], [], Phase.RUNNING, None),
        ([waiting("InvalidImageName", "bad")], [], Phase.FAILED, ErrorClass.CONFIG),
        ([waiting("CreateContainerConfigError", "non-numeric user")], [], Phase.FAILED, ErrorClass.CONFIG),
        ([waiting("ErrImagePull", "manifest unknown: not found")], [], Phase.FAILED, ErrorClass.CONFIG),
        ([waiting("ErrImagePull", "403 Forbidden")], [], Phase.FAILED, ErrorClass.PERMISSION),
        ([waiting("ImagePullBackOff", "Back-off")], [], Phase.PENDING, ErrorClass.INFRASTRUCTURE),
        ([pod(phase="Running")], [], Phase.RUNNING, None),
    ],
)
def test_a_job_that_does_not_run_has_a_reason(
    pods: list[Any], events: list[Any], phase: Phase, expected: ErrorClass | None
) -> None:
    outcome = status(job(), pods, *events)
    assert (outcome.phase, outcome.error_class) == (phase, expected)
    assert outcome.message or phase is Phase.RUNNING
    is_ready = phase is Phase.RUNNING and pods[0]["status"].get("phase") == "Running"
    assert bool(outcome.wait_reason) is (phase is Phase.PENDING or (phase is Phase.RUNNING and not is_ready))


def test_the_reason_for_waiting_is_kubernetes_own() -> None:
    scale_up = event("FailedScaleUp", "failed: GCE quota exceeded. Pod")
    assert status(job(), [UNSCHEDULED], scale_up).wait_reason.endswith("GCE quota exceeded. Pod")
    assert "ContainerCreating" in status(job(), [waiting("ContainerCreating")]).wait_reason
    assert "Back-off" in status(job(), [waiting("ImagePullBackOff", "Back-off pulling image")]).wait_reason


def test_a_job_runs_when_its_last_pod_has_a_machine() -> None:
    assert status(job(), [pod(phase="Running"), UNSCHEDULED], nodes=2).phase is Phase.PENDING
    assert status(job(), [pod(phase="Running"), waiting("ContainerCreating")], nodes=2).phase is Phase.RUNNING


def test_a_node_that_waits_for_the_other_nodes_costs_money() -> None:
    for pods in ([pod(phase="Running"), UNSCHEDULED], [pod(phase="Running")], [waiting("ImagePullBackOff")]):
        outcome = status(job(), pods, nodes=len(pods) + 1)
        assert (outcome.phase, outcome.is_paid) == (Phase.PENDING, True)
    assert not status(job(), [UNSCHEDULED, UNSCHEDULED], nodes=2).is_paid
    assert not status(job(), [], nodes=2).is_paid


@pytest.mark.parametrize(
    ("create", "state", "expected"),
    [
        (True, "RUNNING", "cluster"),
        (True, "RECONCILING", "cluster"),
        (True, "PROVISIONING", None),
        (True, "STOPPING", ErrorClass.INFRASTRUCTURE),
        (True, "ERROR", ErrorClass.INFRASTRUCTURE),
        (True, "DEGRADED", ErrorClass.INFRASTRUCTURE),
        (False, "RUNNING", "cluster"),
        (False, "RECONCILING", "cluster"),
        (False, "PROVISIONING", None),
        (False, "STOPPING", ErrorClass.CONFIG),
        (False, "ERROR", ErrorClass.CONFIG),
        (False, "DEGRADED", ErrorClass.CONFIG),
    ],
)
def test_every_state_of_a_cluster_has_a_status(
    monkeypatch: pytest.MonkeyPatch, create: bool, state: str, expected: Any
) -> None:
    condition = container_v1.StatusCondition(code="UNKNOWN", message="no node has registered")
    cluster = container_v1.Cluster(status=state, resource_labels={"dropforge-run": RUN}, conditions=[condition])
    monkeypatch.setattr(kubernetes, "find_cluster", lambda _, name: cluster)
    monkeypatch.setattr(kubernetes, "connect", lambda _, cluster: Accepting())
    attempt = launch({"cluster": {"create": create}})
    if expected in ("cluster", None):
        assert gke.GkeJobs().provision(cloud_with(), attempt) == (
            None if expected == "cluster" else Waits(f"{cluster_of(attempt)} is being created")
        )
        return
    with pytest.raises(CloudError, match=f"is {state}: UNKNOWN: no node has registered") as failure:
        gke.GkeJobs().provision(cloud_with(), attempt)
    assert (failure.value.error_class, bool(failure.value.hint)) == (expected, True)


class Accepting:
    """A Kubernetes API that accepts every object."""

    def create(self, manifest: Any) -> bool:
        return True

    def ensure(self, cluster: str, manifest: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("is_open", "address", "expected"),
    [
        (True, "", ("https://gke-1.us-central1.gke.goog", "")),
        (True, "203.0.113.7", ("https://gke-1.us-central1.gke.goog", "")),
        (False, "203.0.113.7", ("https://203.0.113.7", "PEM")),
    ],
)
def test_a_cluster_is_reached_by_its_dns_name_if_that_endpoint_is_open(
    is_open: bool, address: str, expected: tuple[str, str]
) -> None:
    dns = {"endpoint": "gke-1.us-central1.gke.goog", "allow_external_traffic": is_open}
    cluster = container_v1.Cluster(
        endpoint=address,
        master_auth={"cluster_ca_certificate": base64.b64encode(b"PEM").decode()},
        control_plane_endpoints_config={"dns_endpoint_config": dns},
    )
    api = kubernetes.connect(cloud_with(), cluster)
    assert (api.host, api.authority) == expected


@pytest.mark.parametrize("accelerator", sorted(GKE_GPUS))
def test_several_nodes_are_refused_unless_the_spec_accepts_tcp(accelerator: str) -> None:
    """Without RDMA, NCCL falls back to TCP, and the GPUs wait for it."""
    count = GKE_GPUS[accelerator].counts[-1]
    machine = {"accelerator": accelerator, "accelerator_count": count, "nodes": 2}
    [problem] = machine_problems(spec(machine))
    assert (problem.pointer, problem.found) == ("/target/nodes", "2")
    assert accelerator in problem.message
    assert "node_network 'tcp'" in str(problem.expected)
    assert machine_problems(spec({**machine, "node_network": "tcp"})) == []
    assert machine_problems(spec({**machine, "nodes": 1})) == []


def test_every_pod_with_a_gpu_selects_the_driver_of_the_table() -> None:
    labels = pod_spec(launch())["nodeSelector"]
    assert labels["cloud.google.com/gke-gpu-driver-version"] == GKE_DRIVER_VERSION
    assert GKE_DRIVERS[GKE_DRIVER_VERSION].branch >= max(gpu.least_driver for gpu in GPUS.values())


def test_the_pods_of_an_endpoint_are_deleted_with_its_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also pods that were orphaned from it. The other parts of an endpoint have no pods."""
    selected: dict[str, str] = {}

    def delete(_: Any, name: str, of_it: str = "") -> bool:
        selected[name] = of_it
        return True

    monkeypatch.setattr(kubernetes, "delete", delete)
    for kind in ("apps.k8s.io/Deployment", "core.k8s.io/Service"):
        assert serve.GkeDeployment().teardown(cloud_with(SETTINGS), kind, f"clusters/c/k8s/{kind}/df-{RUN}-serve")
    assert list(selected.values()) == [f"{workload.INSTANCE}=df-{RUN}-serve", ""]


@pytest.mark.parametrize(
    ("status", "gone", "deletions"),
    [(None, True, 0), ("STOPPING", False, 0), ("RUNNING", False, 1), ("PROVISIONING", False, 1)],
)
def test_a_cluster_is_gone_only_once_a_read_shows_that(
    status: str | None, gone: bool, deletions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []
    api = SimpleNamespace(delete_cluster=lambda name, timeout: deleted.append(name))
    cluster = status and SimpleNamespace(status=container_v1.Cluster.Status[status])
    monkeypatch.setattr(kubernetes, "find_cluster", lambda *_: cluster)
    monkeypatch.setattr(gke, "_delete_disks", lambda *_: True)
    name = f"projects/p/locations/us-central1/clusters/df-{RUN}-a1"
    assert gke.GkeJobs().teardown(cloud_with(SETTINGS, gke=api), kubernetes.CLUSTER, name) is gone
    assert deleted == [name] * deletions
