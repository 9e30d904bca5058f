"""SIGKILL of the emulator at any moment: containers continue, and the restart notices ends meanwhile."""

from __future__ import annotations

import random
import time

import psutil
import pytest

from .conftest import Kube, Stack, ended, make_deployment


def test_running_jobs_are_taken_over(stack: Stack) -> None:
    kube = stack.start()
    kube.create_job("long", "wait-for", str(stack.home / "killed"))
    kube.create_job("short", "sleep", "0.6")
    kube.create_job("broken", "exit", "3", backoffLimit=1)
    kube.until(lambda: kube.job("long").status.ready, lambda ready: ready == 1)
    pods = {pod.metadata.name: pod.metadata.uid for pod in kube.pods()}
    stack.kill()
    time.sleep(0.7)
    again = stack.start()
    (stack.home / "killed").touch()
    assert again.url == kube.url
    assert {name: ended(again.wait_job(name)).type for name in ("long", "short", "broken")} == {
        "long": "Complete", "short": "Complete", "broken": "Failed",
    }  # fmt: skip
    now = {pod.metadata.name: pod.metadata.uid for pod in again.pods()}
    assert pods.items() <= now.items()
    long = again.pods("job-name=long")
    assert (len(long), again.log(long[0].metadata.name)) == (1, "index - wait-for\n")
    assert again.job("broken").status.failed == 2


def test_deletions_are_finished(stack: Stack) -> None:
    kube = stack.start()
    kube.create_job("a", "stubborn", pod={"terminationGracePeriodSeconds": 2})
    name = kube.until(kube.pods, lambda pods: pods and pods[0].status.phase == "Running")[0].metadata.name
    kube.until(lambda: kube.log(name), lambda log: "ignoring" in log)
    kube.batch.delete_namespaced_job("a", "default", propagation_policy="Foreground")
    kube.until(kube.pods, lambda pods: pods[0].metadata.deletion_timestamp)
    stack.kill()
    again = stack.start()
    again.until(again.pods, lambda pods: not pods)
    again.until(lambda: again.batch.list_namespaced_job("default").items, lambda jobs: not jobs)
    again.until(again.processes, lambda processes: not processes)


def test_services_and_deployments_survive_a_restart(stack: Stack) -> None:
    kube = stack.start()
    kube.apps.create_namespaced_deployment("default", make_deployment("d", 2))
    port = {"port": 80, "targetPort": 8000}
    kube.core.create_namespaced_service(
        "default", {"metadata": {"name": "d"}, "spec": {"selector": {"app": "d"}, "ports": [port]}}
    )
    kube.until(
        lambda: kube.apps.read_namespaced_deployment("d", "default").status.ready_replicas, lambda ready: ready == 2
    )
    urls = kube.core.read_namespaced_service("d", "default").metadata.annotations
    started = {pod.metadata.name: pod.status.container_statuses[0].container_id for pod in kube.pods()}
    stack.kill()
    again = stack.start()
    assert again.call("GET", "/api/v1/namespaces/default/services/d/proxy/hello")[1].endswith("/hello")
    assert again.core.read_namespaced_service("d", "default").metadata.annotations == urls
    assert {pod.metadata.name: pod.status.container_statuses[0].container_id for pod in again.pods()} == started
    assert {pod.status.container_statuses[0].restart_count for pod in again.pods()} == {0}


def test_forced_deletions_leave_no_process(stack: Stack) -> None:
    kube = stack.start()
    kube.create_pod("a", "stubborn", terminationGracePeriodSeconds=60)
    kube.until(lambda: kube.pod("a").status.phase == "Running" and kube.log("a"), lambda log: log and "ignoring" in log)
    kube.core.delete_namespaced_pod("a", "default", grace_period_seconds=0)
    stack.kill()
    again = stack.start()
    assert not again.pods()
    again.until(again.processes, lambda processes: not processes)


def test_watch_continues_after_a_restart(stack: Stack) -> None:
    kube = stack.start()
    made = kube.core.create_namespaced_config_map("default", {"metadata": {"name": "a"}})
    kube.core.create_namespaced_config_map("default", {"metadata": {"name": "b"}})
    stack.kill()
    again = stack.start()
    version = made.metadata.resource_version
    path = f"/api/v1/namespaces/default/configmaps?watch=1&timeoutSeconds=1&resourceVersion={version}"
    event = again.call("GET", path)[1]
    assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", "b")


def test_idle_emulator_uses_no_cpu(stack: Stack) -> None:
    kube = stack.start()
    assert stack.process is not None
    kube.create_job("done")
    kube.create_job("running", "sleep", "600")
    kube.create_pod("pending", nodeSelector={"disktype": "ssd"})
    kube.create_pod(
        "waiting", container={"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}
    )
    kube.wait_job("done")
    kube.until(lambda: kube.job("running").status.ready, lambda ready: ready == 1)
    process = psutil.Process(stack.process.pid)

    def cpu_seconds_of_two_seconds() -> float:
        before = process.cpu_times()
        time.sleep(2)
        after = process.cpu_times()
        return after.user + after.system - before.user - before.system

    # At first, nodes are removed and backoffs end.
    kube.until(cpu_seconds_of_two_seconds, lambda spent: spent < 0.15)


@pytest.mark.slow
def test_killed_again_and_again(stack: Stack) -> None:
    """Every job ends, each index succeeds once, and no process remains."""
    kube: Kube = stack.start()
    for number in range(4):
        kube.create_job(
            f"j{number}", "sleep", "0.3", completionMode="Indexed", completions=6, parallelism=3, backoffLimit=3
        )
    kube.create_job("bad", "exit", "1", backoffLimit=2)
    for _ in range(8):
        time.sleep(random.uniform(0.05, 0.9))  # a random moment for the kill
        stack.kill()
        kube = stack.start()
    for number in range(4):
        job = kube.wait_job(f"j{number}")
        assert (ended(job).type, job.status.completed_indexes, job.status.failed) == ("Complete", "0-5", None)
        assert len(kube.pods(f"job-name=j{number}")) == 6
    assert (ended(kube.wait_job("bad")).reason, kube.job("bad").status.failed) == ("BackoffLimitExceeded", 3)
    kube.until(kube.processes, lambda processes: not processes)
