"""Jobs with real processes: completions, indexes, failures and their reasons, deadlines, suspension."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from .conftest import NAME, Kube, ended, make_deployment, make_job


def conditions(job: Any) -> dict[str, str]:
    return {item.type: item.reason for item in job.status.conditions or [] if item.status == "True"}


def test_a_job_runs_to_its_end(kube: Kube) -> None:
    kube.create_job("a")
    job = kube.wait_job("a")
    assert conditions(job) == {"SuccessCriteriaMet": "CompletionsReached", "Complete": "CompletionsReached"}
    assert (job.status.succeeded, job.status.failed, job.status.active, job.status.ready) == (1, None, None, 0)
    assert job.status.completion_time >= job.status.start_time
    pod = kube.pods("job-name=a")[0]
    assert (pod.status.phase, pod.metadata.finalizers) == ("Succeeded", None)
    assert kube.log(pod.metadata.name) == "index - succeed\n"
    assert ("Completed", "Job completed") in kube.events("a")


def test_indexed_jobs_know_their_index(kube: Kube) -> None:
    kube.create_job("a", completionMode="Indexed", completions=5, parallelism=3)
    job = kube.wait_job("a")
    assert (job.status.completed_indexes, job.status.succeeded) == ("0-4", 5)
    logs = sorted(kube.log(pod.metadata.name) for pod in kube.pods("job-name=a"))
    assert logs == [f"index {index} succeed\n" for index in range(5)]
    names = {pod.spec.hostname for pod in kube.pods("job-name=a")}
    assert names == {f"a-{index}" for index in range(5)}


def test_parallelism_bounds_active_pods(kube: Kube) -> None:
    kube.create_job("a", "sleep", "0.3", completions=4, parallelism=2)
    most = 0
    while not ended(job := kube.job("a")):
        most = max(most, job.status.active or 0)
        time.sleep(0.02)
    assert (most, job.status.succeeded) == (2, 4)


def test_work_queues_end_with_their_first_success(kube: Kube) -> None:
    kube.create_job("a", "sleep", "0.1", parallelism=2)
    job = kube.wait_job("a")
    assert (job.spec.completions, job.status.succeeded) == (None, 2)


def test_failures_are_retried_until_the_limit(kube: Kube) -> None:
    kube.create_job("a", "exit", "3", backoffLimit=2)
    job = kube.wait_job("a")
    assert conditions(job) == {"FailureTarget": "BackoffLimitExceeded", "Failed": "BackoffLimitExceeded"}
    assert (job.status.failed, len(kube.pods("job-name=a"))) == (3, 3)
    codes = {pod.status.container_statuses[0].state.terminated.exit_code for pod in kube.pods("job-name=a")}
    assert codes == {3}


def test_a_job_can_succeed_after_failures(kube: Kube, tmp_path: Path) -> None:
    kube.create_job("a", "fail-until", str(tmp_path / "count"), "2", backoffLimit=3)
    job = kube.wait_job("a")
    assert (conditions(job)["Complete"], job.status.failed, job.status.succeeded) == ("CompletionsReached", 2, 1)


def test_on_failure_restarts_in_place(kube: Kube, tmp_path: Path) -> None:
    pod = {"restartPolicy": "OnFailure"}
    kube.create_job("a", "fail-until", str(tmp_path / "count"), "2", backoffLimit=3, pod=pod)
    job = kube.wait_job("a")
    status = kube.pods("job-name=a")[0].status.container_statuses[0]
    assert (job.status.failed, status.restart_count, len(kube.pods("job-name=a"))) == (None, 2, 1)
    assert status.last_state.terminated.exit_code == 1
    kube.create_job("b", "exit", "1", backoffLimit=1, pod=pod)
    assert conditions(kube.wait_job("b"))["Failed"] == "BackoffLimitExceeded"


def policy(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"rules": list(rules)}


def on_codes(action: str, *values: int, operator: str = "In") -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"operator": operator, "values": list(values)}}


@pytest.mark.parametrize(
    ("code", "reason", "failed"),
    [("42", "PodFailurePolicy", 1), ("7", "BackoffLimitExceeded", 2), ("9", "PodFailurePolicy", 1)],
)
def test_pod_failure_policy_matches_exit_codes(kube: Kube, code: str, reason: str, failed: int) -> None:
    rules = policy(on_codes("FailJob", 42), on_codes("Count", 7), on_codes("FailJob", 42, operator="NotIn"))
    kube.create_job("a", "exit", code, backoffLimit=1, podFailurePolicy=rules)
    job = kube.wait_job("a")
    assert (conditions(job)["Failed"], job.status.failed) == (reason, failed)
    if code == "42":
        assert "failed with exit code 42 matching FailJob rule at index 0" in ended(job).message


def test_ignored_failures_are_replaced_and_not_counted(kube: Kube, tmp_path: Path) -> None:
    rules = policy(on_codes("Ignore", 1))
    kube.create_job("a", "fail-until", str(tmp_path / "count"), "2", podFailurePolicy=rules)
    job = kube.wait_job("a")
    assert (conditions(job)["Complete"], job.status.failed) == ("CompletionsReached", None)
    assert len(kube.pods("job-name=a")) == 3


def test_deadlines_end_a_job_and_its_pods(kube: Kube) -> None:
    kube.create_job("a", "polite", "0", activeDeadlineSeconds=1)
    job = kube.wait_job("a")
    assert conditions(job)["Failed"] == "DeadlineExceeded"
    assert ended(job).message == "Job was active longer than specified deadline"
    kube.until(kube.pods, lambda pods: not pods)


def test_finished_jobs_are_deleted_after_their_ttl(kube: Kube) -> None:
    kube.create_job("a", ttlSecondsAfterFinished=1)
    kube.wait_job("a")
    path = f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/a"
    kube.until(lambda: kube.call("GET", path)[0], lambda code: code == 404)
    kube.until(kube.pods, lambda pods: not pods)


def test_suspension_deletes_pods_without_counting_them(kube: Kube) -> None:
    kube.create_job("a", "sleep", "600")
    kube.until(lambda: kube.job("a").status.ready, lambda ready: ready == 1)
    kube.batch.patch_namespaced_job("a", kube.namespace, {"spec": {"suspend": True}})
    kube.until(kube.pods, lambda pods: not pods)
    job = kube.until(lambda: kube.job("a"), lambda job: "Suspended" in conditions(job))
    assert (job.status.active, job.status.failed, job.status.start_time) == (None, None, None)
    kube.batch.patch_namespaced_job("a", kube.namespace, {"spec": {"suspend": False}})
    kube.until(lambda: kube.job("a").status.active, lambda active: active == 1)


def test_jobs_deleted_without_a_policy_orphan_their_pods(kube: Kube) -> None:
    kube.create_job("a", "sleep", "600")
    kube.until(lambda: kube.job("a").status.ready, lambda ready: ready == 1)
    path = f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/a"
    _, _, headers = kube.call("DELETE", path)
    assert "child pods are preserved by default" in headers["Warning"]
    kube.until(lambda: kube.call("GET", path)[0], lambda code: code == 404)
    pod = kube.until(kube.pods, lambda pods: not pods[0].metadata.owner_references)[0]
    assert (pod.status.phase, pod.metadata.finalizers) == ("Running", None)


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_jobs_deleted_with_a_policy_delete_their_pods(kube: Kube, propagation: str) -> None:
    kube.create_job("a", "polite", "0", parallelism=2, completions=2)
    kube.until(lambda: kube.job("a").status.ready, lambda ready: ready == 2)
    kube.batch.delete_namespaced_job("a", kube.namespace, propagation_policy=propagation)
    kube.until(kube.pods, lambda pods: not pods)
    path = f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/a"
    kube.until(lambda: kube.call("GET", path)[0], lambda code: code == 404)
    assert not [name for name in kube.live() if kube.namespace in name]


def test_foreground_deletion_deletes_pods_before_the_job(kube: Kube) -> None:
    kube.create_job("a", "stubborn", pod={"terminationGracePeriodSeconds": 1})
    pod = kube.until(kube.pods, lambda pods: pods and pods[0].status.phase == "Running")[0].metadata.name
    kube.until(lambda: kube.log(pod), lambda log: "ignoring" in log)
    kube.batch.delete_namespaced_job("a", kube.namespace, propagation_policy="Foreground")
    deleting = kube.until(lambda: kube.pod(pod), lambda item: item.metadata.deletion_timestamp)
    job = kube.job("a")
    assert (deleting.status.phase, job.metadata.finalizers) == ("Running", ["foregroundDeletion"])
    assert job.metadata.deletion_timestamp is not None
    path = f"/apis/batch/v1/namespaces/{kube.namespace}/jobs/a"
    kube.until(lambda: kube.call("GET", path)[0], lambda code: code == 404)
    assert kube.pods() == []


def test_failed_jobs_keep_their_pods(kube: Kube) -> None:
    limited = {"container": {"resources": {"limits": {"memory": "100Mi"}}}}
    kube.create_job("a", "exit", "65", podFailurePolicy=policy(on_codes("FailJob", 65)))
    kube.create_job("b", "hog", pod=limited)
    for name, code, reason in (("a", 65, "Error"), ("b", 137, "OOMKilled")):
        kube.wait_job(name)
        (pod,) = kube.pods(f"job-name={name}")
        state = pod.status.container_statuses[0].state.terminated
        assert (pod.status.phase, state.exit_code, state.reason) == ("Failed", code, reason)
        assert pod.metadata.finalizers is None


def test_pods_deleted_by_hand_are_replaced(kube: Kube) -> None:
    kube.create_job("a", "sleep", "600", backoffLimit=1)
    first = kube.until(kube.pods, lambda pods: pods and pods[0].status.phase == "Running")[0]
    kube.core.delete_namespaced_pod(first.metadata.name, kube.namespace, grace_period_seconds=0)
    second = kube.until(
        kube.pods,
        lambda pods: pods and pods[0].metadata.uid != first.metadata.uid and pods[0].status.phase == "Running",
    )
    assert (len(second), kube.job("a").status.failed) == (1, 1)


def test_refused_pods_are_reported(kube: Kube) -> None:
    job = make_job("a", pod={"serviceAccountName": "missing"})
    kube.batch.create_namespaced_job(kube.namespace, job)
    kube.until(lambda: dict(kube.events("a")).get("FailedCreate", ""), lambda text: "service account" in text)
    kube.core.create_namespaced_service_account(kube.namespace, {"metadata": {"name": "missing"}})
    kube.wait_job("a")


def test_output_is_kept_under_the_name_of_the_workload(kube: Kube) -> None:
    kube.create_job("a", "exit", "3", backoffLimit=1)
    kube.apps.create_namespaced_deployment(kube.namespace, make_deployment("d"))
    kube.wait_job("a")
    kube.until(lambda: kube.apps.read_namespaced_deployment("d", kube.namespace).status.ready_replicas, bool)
    kube.batch.delete_namespaced_job("a", kube.namespace, propagation_policy="Foreground")
    kube.apps.delete_namespaced_deployment("d", kube.namespace)
    kube.until(kube.pods, lambda pods: not pods)
    assert workload_log(kube, "batch/jobs/a") == (200, "index - exit\n" * 2)
    assert workload_log(kube, "batch/jobs/a?tail=1") == (200, "index - exit\n")
    code, text = workload_log(kube, "apps/deployments/d")
    assert (code, text.split()[0]) == (200, "serving")
    assert [workload_log(kube, name)[0] for name in ("batch/jobs/b", "services/d")] == [404, 404]


def workload_log(kube: Kube, workload: str) -> tuple[int, str]:
    """(status, text) of the log that the stack keeps for a workload's Cloud Asset Inventory name."""
    try:
        with urllib.request.urlopen(
            f"{kube.admin}/_local/logs/{NAME}/k8s/namespaces/{kube.namespace}/{workload}"
        ) as body:
            return body.status, body.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""
