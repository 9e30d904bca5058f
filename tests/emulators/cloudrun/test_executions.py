"""Executions: containers run, fail, are retried, time out, are cancelled, preempted and deleted."""

from __future__ import annotations

import json
import os
import urllib.error
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import run_v2

from dropforge_local.emulators.cloudrun import CloudRunConfig

REASON = run_v2.Condition.ExecutionReason
COMPLETION = run_v2.ExecutionReference.CompletionStatus


def start(cloud: Any, make: Any, *args: str, job_id: str = "j1", **task: Any) -> run_v2.Execution:
    job = cloud.done(cloud.jobs.create_job(parent=make.parent, job=make.job(*args, **task), job_id=job_id))
    return cloud.jobs.run_job(name=job.name).metadata


def completed(execution: run_v2.Execution) -> run_v2.Condition:
    return next(condition for condition in execution.conditions if condition.type_ == "Completed")


def only_task(cloud: Any, execution: run_v2.Execution) -> run_v2.Task:
    (task,) = cloud.tasks.list_tasks(parent=execution.name)
    return task


def running(cloud: Any, execution: run_v2.Execution, text: str) -> None:
    def output() -> str:
        return cloud.logs(execution.name) if cloud.processes() else ""

    cloud.until(output, lambda logged: text in logged)


def test_success_is_in_the_execution_the_job_and_the_task(cloud: Any, make: Any) -> None:
    execution = cloud.wait(start(cloud, make).name)
    assert completed(execution).state == run_v2.Condition.State.CONDITION_SUCCEEDED
    assert (execution.succeeded_count, execution.running_count, execution.reconciling) == (1, 0, False)
    assert execution.create_time <= execution.start_time <= execution.completion_time
    job = cloud.jobs.get_job(name=f"{make.parent}/jobs/j1")
    assert job.execution_count == 1
    assert job.latest_created_execution.completion_status == COMPLETION.EXECUTION_SUCCEEDED
    task = only_task(cloud, execution)
    assert (task.name, task.last_attempt_result.status.code) == (
        f"{execution.name}/tasks/{execution.name.rsplit('/')[-1]}-task0",
        0,
    )
    assert cloud.logs(execution.name) == "task 0 attempt 0 succeed\n"
    assert execution.log_uri == f"{cloud.url}/_local/logs/{execution.name}"


def test_an_ephemeral_disk_is_a_directory_at_its_mount_path(cloud: Any, make: Any) -> None:
    """As a client sends it that knows the name of the medium; google-cloud-run does not."""
    text = run_v2.Job.to_json(
        make.job(
            "wait-for",
            "/work/here",
            "0",
            volumes=[{"name": "disk", "empty_dir": {"medium": 2, "size_limit": "10Gi"}}],
            container={"volume_mounts": [{"name": "disk", "mount_path": "/work"}]},
        )
    )
    job = json.loads(text)
    job["launchStage"] = "BETA"
    job["template"]["template"]["volumes"][0]["emptyDir"]["medium"] = "DISK"
    job["startExecutionToken"] = "t1"
    cloud.call("POST", f"/v2/{make.parent}/jobs?jobId=j1", job)
    name = f"{make.parent}/jobs/j1/executions/j1-t1"
    (mounted,) = cloud.until(lambda: list(cloud.directory.glob("*/rootfs/work")), bool)
    assert mounted.is_symlink()
    (mounted / "here").touch()
    assert cloud.wait(name).succeeded_count == 1


def test_run_operation_ends_with_the_execution(cloud: Any, make: Any) -> None:
    cloud.done(cloud.jobs.create_job(parent=make.parent, job=make.job("fail"), job_id="j1"))
    execution = cloud.done(cloud.jobs.run_job(name=f"{make.parent}/jobs/j1"))
    assert (execution.failed_count, execution.completion_time is None) == (1, False)


def test_non_zero_exit_fails_with_its_code(cloud: Any, make: Any) -> None:
    execution = cloud.wait(start(cloud, make, "fail").name)
    assert completed(execution).execution_reason == REASON.NON_ZERO_EXIT_CODE
    assert completed(execution).message.endswith(
        "failed with exit code: 7 and message: The container exited with an error."
    )
    assert only_task(cloud, execution).last_attempt_result.exit_code == 7


def test_failed_attempts_are_retried(cloud: Any, make: Any) -> None:
    execution = cloud.wait(start(cloud, make, "fail-first", max_retries=2).name)
    assert (execution.succeeded_count, execution.retried_count) == (1, 1)
    assert cloud.logs(execution.name) == "task 0 attempt 0 fail-first\ntask 0 attempt 1 fail-first\n"
    assert cloud.logs(execution.name, tail=1) == "task 0 attempt 1 fail-first\n"


def test_retries_are_exhausted(cloud: Any, make: Any) -> None:
    execution = cloud.wait(start(cloud, make, "fail", max_retries=2).name)
    assert (execution.failed_count, execution.retried_count) == (1, 2)
    assert cloud.logs(execution.name).count("attempt") == 3


def test_the_environment_has_variables_of_cloud_run_the_platform_and_the_job(cloud: Any, make: Any) -> None:
    env = [
        {"name": "PLAIN", "value": "1"},
        {"name": "TOKEN", "value_source": {"secret_key_ref": {"secret": "hf-token", "version": "latest"}}},
    ]
    execution = cloud.wait(start(cloud, make, "env", container={"env": env}).name)
    seen = json.loads(cloud.logs(execution.name).splitlines()[1])
    short = execution.name.rsplit("/")[-1]
    assert {key: value for key, value in seen.items() if key.startswith("CLOUD_RUN")} == {
        "CLOUD_RUN_JOB": "j1",
        "CLOUD_RUN_EXECUTION": short,
        "CLOUD_RUN_TASK_INDEX": "0",
        "CLOUD_RUN_TASK_ATTEMPT": "0",
        "CLOUD_RUN_TASK_COUNT": "1",
    }
    assert (seen["PLAIN"], seen["TOKEN"], seen["DROPFORGE_ENDPOINT"]) == ("1", "s3cret", "http://127.0.0.1:1")
    assert seen["PYTHONPATH"].endswith("/rootfs/app")
    assert not {"HF_HUB_OFFLINE", "USER", "VIRTUAL_ENV"} & set(seen)


def test_overrides_change_one_run_only(cloud: Any, make: Any) -> None:
    start(cloud, make, container={"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]})
    override = {"args": ["env"], "env": [{"name": "B", "value": "2"}]}
    request = run_v2.RunJobRequest(
        name=f"{make.parent}/jobs/j1", overrides={"container_overrides": [override], "task_count": 2, "timeout": "30s"}
    )
    execution = cloud.wait(cloud.jobs.run_job(request=request).metadata.name)
    assert (execution.task_count, execution.template.timeout.total_seconds()) == (2, 30)
    seen = json.loads(cloud.logs(execution.name).splitlines()[1])
    assert (seen["A"], seen["B"]) == ("1", "2")
    assert list(cloud.jobs.get_job(name=request.name).template.template.containers[0].args) == []


def test_every_run_is_a_new_execution(cloud: Any, make: Any) -> None:
    first = start(cloud, make)
    second = cloud.jobs.run_job(name=f"{make.parent}/jobs/j1").metadata
    assert first.name != second.name
    assert len(list(cloud.executions.list_executions(parent=f"{make.parent}/jobs/j1"))) == 2
    assert len(list(cloud.executions.list_executions(parent=f"{make.parent}/jobs/-"))) == 2


def test_start_token_names_the_execution_and_starts_it_once(cloud: Any, make: Any) -> None:
    job = make.job()
    job.start_execution_token = "a1"
    created = cloud.done(cloud.jobs.create_job(parent=make.parent, job=job, job_id="j1"))
    assert created.latest_created_execution.name == "j1-a1"
    name = f"{created.name}/executions/j1-a1"
    cloud.wait(name)
    created.start_execution_token = "a1"
    assert cloud.done(cloud.jobs.update_job(job=created)).execution_count == 1
    cloud.done(cloud.executions.delete_execution(name=name))
    created.etag = ""
    assert cloud.done(cloud.jobs.update_job(job=created)).execution_count == 1
    created.start_execution_token = "a2"
    assert cloud.done(cloud.jobs.update_job(job=created)).latest_created_execution.name == "j1-a2"


def test_a_run_token_makes_the_job_ready_at_the_end_of_the_execution(cloud: Any, make: Any) -> None:
    job = make.job("sleep", "0.5")
    job.run_execution_token = "r"
    created = cloud.done(cloud.jobs.create_job(parent=make.parent, job=job, job_id="j1"))
    assert created.latest_created_execution.completion_status == COMPLETION.EXECUTION_SUCCEEDED


class TestTimeout:
    @pytest.fixture
    def config(self) -> CloudRunConfig:
        return CloudRunConfig(operation_seconds=0.02, grace_seconds=60.0, probe_seconds=0.05, restart_seconds=0.1)

    def test_a_task_past_its_timeout_gets_sigterm_and_fails(self, cloud: Any, make: Any) -> None:
        execution = start(cloud, make, "polite", timeout="600s")
        running(cloud, execution, "waiting")
        cloud.clock.advance(600)
        execution = cloud.wait(execution.name)
        assert "checkpoint" in cloud.logs(execution.name)
        result = only_task(cloud, execution).last_attempt_result
        assert (result.status.code, result.term_signal) == (4, 15)
        assert result.status.message == "The configured timeout was reached."
        assert "reached the maximum timeout of 600 seconds" in cloud.logs(execution.name)


def test_task_that_ignores_sigterm_is_killed(cloud: Any, make: Any) -> None:
    execution = start(cloud, make, "stubborn", timeout="600s")
    running(cloud, execution, "ignoring")
    cloud.clock.advance(600)
    execution = cloud.wait(execution.name)
    assert only_task(cloud, execution).last_attempt_result.term_signal == 9
    assert cloud.processes() == []


def test_a_task_above_its_memory_limit_is_killed(cloud: Any, make: Any) -> None:
    execution = cloud.wait(start(cloud, make, "hog").name)
    result = only_task(cloud, execution).last_attempt_result
    assert (result.exit_code, result.term_signal) == (0, 9)
    expected = "task0 failed with exit code: 0 and message: The configured memory limit was reached."
    assert completed(execution).message.endswith(expected)
    assert "Memory limit of 512 MiB exceeded" in cloud.logs(execution.name)


def test_cancel_ends_the_containers(cloud: Any, make: Any) -> None:
    execution = start(cloud, make, "sleep", "600", max_retries=3)
    running(cloud, execution, "sleep")
    cancelled = cloud.done(cloud.executions.cancel_execution(name=execution.name))
    assert completed(cancelled).execution_reason == REASON.CANCELLED
    assert (cancelled.cancelled_count, cancelled.retried_count) == (1, 0)
    assert cloud.processes() == []
    with pytest.raises(exceptions.BadRequest, match="has completed"):
        cloud.executions.cancel_execution(name=execution.name)


def test_the_deletion_of_a_running_job_leaves_no_process(cloud: Any, make: Any) -> None:
    execution = start(cloud, make, "stubborn")
    running(cloud, execution, "ignoring")
    cloud.done(cloud.jobs.delete_job(name=f"{make.parent}/jobs/j1"))
    assert (cloud.live(), cloud.processes()) == ([], [])
    with pytest.raises(exceptions.NotFound):
        cloud.executions.get_execution(name=execution.name)
    assert "ignoring" in cloud.logs(execution.name)


@pytest.mark.parametrize(("mode", "line", "signal"), [("polite", "waiting", 15), ("sleep", "sleep", 9)])
def test_a_preemption_fails_the_attempt(cloud: Any, make: Any, mode: str, line: str, signal: int) -> None:
    """SIGTERM does nothing to a container without a handler, which is killed after the grace time."""
    execution = start(cloud, make, mode, "600")
    running(cloud, execution, line)
    cloud.faults(preempt=execution.name.rsplit("/")[-1])
    result = only_task(cloud, cloud.wait(execution.name)).last_attempt_result
    assert (result.status.code, result.term_signal) == (14, signal)


def test_parallelism_bounds_tasks_and_a_failed_task_cancels_the_others(cloud: Any, make: Any) -> None:
    execution = start(cloud, make, "fail-other", "60", task_count=3, parallelism=2)
    done = cloud.wait(execution.name)
    assert (done.failed_count, done.cancelled_count, done.succeeded_count) == (1, 2, 0)
    assert len(list(cloud.tasks.list_tasks(parent=execution.name))) == 3
    assert "task 2" not in cloud.logs(execution.name)


def test_an_execution_is_pending_during_a_stock_out(cloud: Any, make: Any) -> None:
    cloud.faults(stockout=["us-central1"])
    gpu = {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
    selector = {"accelerator": "nvidia-l4"}
    execution = start(cloud, make, limits=gpu, node_selector=selector)

    def waiting() -> str:
        conditions = cloud.executions.get_execution(name=execution.name).conditions
        return next((part.message for part in conditions if part.type_ == "ResourcesAvailable"), "")

    assert "Insufficient capacity: waiting for nvidia-l4 in us-central1" in cloud.until(waiting, bool)
    job = cloud.jobs.get_job(name=f"{make.parent}/jobs/j1")
    assert job.latest_created_execution.completion_status == COMPLETION.EXECUTION_PENDING
    cloud.faults(stockout=[])
    assert cloud.wait(execution.name).succeeded_count == 1


def test_pending_execution_can_be_cancelled(cloud: Any, make: Any) -> None:
    cloud.faults(stockout=["us-central1"])
    gpu = {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
    execution = start(cloud, make, limits=gpu, node_selector={"accelerator": "nvidia-l4"})
    assert cloud.done(cloud.executions.cancel_execution(name=execution.name)).cancelled_count == 1


def test_the_gpu_quota_bounds_concurrent_executions(cloud: Any, make: Any) -> None:
    cloud.faults(quota={"us-central1": {"nvidia-l4": 1}})
    gpu = {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
    first = start(cloud, make, "sleep", "600", limits=gpu, node_selector={"accelerator": "nvidia-l4"})
    running(cloud, first, "sleep")
    request = run_v2.RunJobRequest(
        name=f"{make.parent}/jobs/j1", overrides={"container_overrides": [{"args": ["succeed"]}]}
    )
    second = cloud.jobs.run_job(request=request).metadata

    def state() -> Any:
        return cloud.executions.get_execution(name=second.name)

    cloud.until(state, lambda execution: any("quota" in condition.message for condition in execution.conditions))
    cloud.done(cloud.executions.cancel_execution(name=first.name))
    assert cloud.wait(second.name).succeeded_count == 1


def test_container_killed_from_outside_fails_with_137(cloud: Any, make: Any) -> None:
    execution = start(cloud, make, "sleep", "600")
    running(cloud, execution, "sleep")
    for pid in cloud.processes():
        os.kill(pid, 9)
    assert only_task(cloud, cloud.wait(execution.name)).last_attempt_result.exit_code == 137


def test_the_logs_of_a_job_that_never_ran_are_not_found(cloud: Any, make: Any) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        cloud.logs(f"{make.parent}/jobs/never")
