"""SIGKILL ends the emulator's process; the next process finds every resource and container again."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from google.cloud import run_v2
from tests.patience import until

GOOD = {"Authorization": "Bearer good"}


def begin(cloud: Any, make: Any, *args: str, **task: Any) -> str:
    job = make.job(*args, **task)
    job.start_execution_token = "a1"
    cloud.done(cloud.jobs.create_job(parent=make.parent, job=job, job_id="j1"))
    name = f"{make.parent}/jobs/j1/executions/j1-a1"
    cloud.until(lambda: cloud.executions.get_execution(name=name), lambda execution: bool(execution.start_time))
    cloud.until(lambda: cloud.logs(name), lambda text: "attempt 0" in text)
    return name


def get(url: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=GOOD), timeout=60) as response:
        return json.loads(response.read())


def pid_or_status(url: str) -> int:
    """The process that answers, or the status of the refusal."""
    try:
        return int(get(url)["pid"])
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_a_running_job_is_adopted(stack: Any, make: Any) -> None:
    name = begin(stack.start(), make, "wait-for", str(stack.home / "go"), "0")
    stack.kill()
    cloud = stack.start()
    assert cloud.executions.get_execution(name=name).running_count == 1
    (stack.home / "go").touch()
    done = cloud.wait(name)
    assert (done.succeeded_count, done.retried_count) == (1, 0)
    assert cloud.logs(name).count("attempt") == 1


@pytest.mark.parametrize(("code", "succeeded"), [(0, 1), (5, 0)])
def test_a_job_that_ended_without_a_stack_has_its_exit_code(stack: Any, make: Any, code: int, succeeded: int) -> None:
    name = begin(stack.start(), make, "wait-for", str(stack.home / "go"), str(code))
    stack.kill()
    (stack.home / "go").touch()
    (container,) = (stack.home / "containers").iterdir()
    until((container / "exit").exists)
    cloud = stack.start()
    assert cloud.wait(name).succeeded_count == succeeded
    (task,) = cloud.tasks.list_tasks(parent=name)
    assert task.last_attempt_result.exit_code == code
    # The time of the container's end, not of the next stack's start.
    assert abs(task.completion_time.timestamp() - float((container / "exit").read_text().split()[1])) < 0.01


def test_deadline_holds_across_a_restart(stack: Any, make: Any) -> None:
    name = begin(stack.start(), make, "sleep", "600", timeout="2s")
    stack.kill()
    cloud = stack.start()
    cloud.wait(name)
    (task,) = cloud.tasks.list_tasks(parent=name)
    assert task.last_attempt_result.status.code == 4
    assert cloud.processes() == []


def test_a_process_killed_without_a_stack_counts_as_killed(stack: Any, make: Any) -> None:
    cloud = stack.start()
    name = begin(cloud, make, "sleep", "600")
    stack.kill()
    for pid in cloud.processes():
        os.kill(pid, 9)
    cloud = stack.start()
    cloud.wait(name)
    (task,) = cloud.tasks.list_tasks(parent=name)
    assert task.last_attempt_result.exit_code == 137


def test_a_begun_deletion_is_finished(stack: Any, make: Any) -> None:
    cloud = stack.start()
    name = begin(cloud, make, "stubborn")
    cloud.jobs.delete_job(name=f"{make.parent}/jobs/j1")
    stack.kill()
    cloud = stack.start()
    cloud.until(lambda: list(cloud.jobs.list_jobs(parent=make.parent)), lambda jobs: jobs == [])
    assert (cloud.processes(), name.startswith(make.parent)) == ([], True)


def test_a_begun_cancel_is_finished(stack: Any, make: Any) -> None:
    cloud = stack.start()
    name = begin(cloud, make, "stubborn", max_retries=3)
    cloud.executions.cancel_execution(name=name)
    stack.kill()
    done = stack.start().wait(name)
    assert (done.cancelled_count, done.retried_count) == (1, 0)


def test_a_begun_create_starts_its_execution_once(stack: Any, make: Any) -> None:
    cloud = stack.start()
    job = make.job("sleep", "1")
    job.start_execution_token = "a1"
    cloud.jobs.create_job(parent=make.parent, job=job, job_id="j1")
    stack.kill()
    cloud = stack.start()
    name = f"{make.parent}/jobs/j1/executions/j1-a1"
    cloud.until(
        lambda: [execution.name for execution in cloud.executions.list_executions(parent=f"{make.parent}/jobs/j1")],
        bool,
    )
    assert cloud.wait(name).succeeded_count == 1
    assert cloud.jobs.get_job(name=f"{make.parent}/jobs/j1").execution_count == 1


def test_a_service_keeps_its_port_and_its_instance(stack: Any, make: Any) -> None:
    cloud = stack.start()
    service = cloud.done(cloud.services.create_service(parent=make.parent, service=make.service(), service_id="s1"))
    before = get(service.uri)["pid"]
    stack.kill()
    cloud = stack.start()
    assert get(service.uri)["pid"] == before
    stack.kill()
    for pid in cloud.processes():
        os.kill(pid, 9)
    cloud = stack.start()
    # A request that reaches an instance before its end is seen gets 503, as from Cloud Run.
    assert cloud.until(lambda: pid_or_status(service.uri), lambda found: found != 503) != before
    cloud.done(cloud.services.delete_service(name=service.name))
    assert cloud.processes() == []


def test_a_begun_deployment_is_finished(stack: Any, make: Any) -> None:
    cloud = stack.start()
    probe = {"http_get": {"path": "/health"}, "period_seconds": 1, "timeout_seconds": 1, "failure_threshold": 30}
    service = make.service({"WARM_UP": "1.5"}, container={"startup_probe": probe})
    cloud.services.create_service(parent=make.parent, service=service, service_id="s1")
    cloud.until(cloud.processes, bool)
    stack.kill()
    cloud = stack.start()
    name = f"{make.parent}/services/s1"
    ready = cloud.until(lambda: cloud.services.get_service(name=name), lambda service: not service.reconciling)
    assert ready.terminal_condition.state == run_v2.Condition.State.CONDITION_SUCCEEDED
    assert len(list((stack.home / "containers").iterdir())) == 1
    assert get(ready.uri)["service"] == "s1"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_any_moment_run_a_container_once_and_lose_no_resource(stack: Any, make: Any, seed: int) -> None:
    moments = random.Random(seed)
    job = make.job("sleep", "2", max_retries=3)
    job.start_execution_token = "a1"
    service = make.service()
    for life in range(7):
        cloud = stack.start()
        try:
            if life == 0:
                cloud.jobs.create_job(parent=make.parent, job=job, job_id="j1", retry=None)
                cloud.services.create_service(parent=make.parent, service=service, service_id="s1", retry=None)
        finally:
            time.sleep(moments.uniform(0, 0.4))
            stack.kill()
    cloud = stack.start()
    name = f"{make.parent}/jobs/j1/executions/j1-a1"
    done = cloud.wait(name)
    assert (done.succeeded_count, done.retried_count, cloud.logs(name).count("attempt")) == (1, 0, 1)
    ready = cloud.until(
        lambda: cloud.services.get_service(name=f"{make.parent}/services/s1"), lambda service: not service.reconciling
    )
    assert get(ready.uri)["service"] == "s1"
    cloud.jobs.delete_job(name=f"{make.parent}/jobs/j1")
    cloud.services.delete_service(name=ready.name)
    stack.kill()
    cloud = stack.start()
    cloud.until(lambda: list(cloud.jobs.list_jobs(parent=make.parent)), lambda left: not left)
    cloud.until(lambda: list(cloud.services.list_services(parent=make.parent)), lambda left: not left)
    assert cloud.processes() == []


def test_a_taken_service_port_is_named(stack: Any, make: Any) -> None:
    cloud = stack.start()
    service = cloud.done(cloud.services.create_service(parent=make.parent, service=make.service(), service_id="s1"))
    stack.kill()
    port = int(service.uri.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        command = [sys.executable, "-P", stack.program, str(stack.home), str(stack.port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f"port {port} of service '{service.name}' is taken" in done.stderr
