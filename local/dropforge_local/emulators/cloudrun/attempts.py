"""The attempts of a task: their containers' names and environments, and their results."""

from __future__ import annotations

import signal
from typing import Any

from google.cloud import run_v2
from google.rpc import status_pb2

from dropforge_local.base.errors import RPC_CODE

from ...containers.processes import LOST, OUT_OF_MEMORY, Exit
from .store import short

TIMED_OUT = "TIMEOUT"
STOPPED = "STOPPED"
PREEMPTED = "PREEMPTED"
# Status, text and whether the result names a signal, by the reason of the container's end. Users of Cloud Run report
# the texts of timeouts and of memory; the other two texts are the local stack's own.
RESULTS = {
    TIMED_OUT: ("DEADLINE_EXCEEDED", "The configured timeout was reached.", True),
    PREEMPTED: (
        "UNAVAILABLE",
        "The instance was terminated by the system: GPU instances are not migrated at maintenance.",
        True,
    ),
    OUT_OF_MEMORY: ("RESOURCE_EXHAUSTED", "The configured memory limit was reached.", True),
    LOST: ("UNAVAILABLE", "The container was killed from outside.", False),
}


def container_id(task: Any, execution: Any) -> str:
    # The uid, because a later job may have the same name and token as a deleted job.
    return f"{short(task.name)}-{task.retried}-{execution.uid[:8]}"


def task_environment(execution: Any, task: Any) -> dict[str, str]:
    """https://cloud.google.com/run/docs/container-contract#jobs-env-vars"""
    return {
        "CLOUD_RUN_JOB": execution.job,
        "CLOUD_RUN_EXECUTION": short(execution.name),
        "CLOUD_RUN_TASK_INDEX": str(task.index),
        "CLOUD_RUN_TASK_ATTEMPT": str(task.retried),
        "CLOUD_RUN_TASK_COUNT": str(execution.task_count),
    }


def attempt_result(attempt: Exit | str) -> Any:
    """The result of a container's end, or of a start that failed with a text. Its code 0 is success.

    A result has an exit_code or a term_signal, never both.
    """
    if isinstance(attempt, str):
        return _result("FAILED_PRECONDITION", attempt)
    if attempt.reason in RESULTS:
        status, text, names_signal = RESULTS[attempt.reason]
        code = {"term_signal": _signal_of(attempt)} if names_signal else {"exit_code": attempt.code}
        return _result(status, text, **code)
    if attempt.code:
        return _result("ABORTED", "The container exited with an error.", exit_code=attempt.code)
    return run_v2.TaskAttemptResult()


def state_of(task: Any) -> str:
    """pending, running, succeeded, failed or cancelled."""
    if not task.completion_time:
        return "running" if task.start_time else "pending"
    completed = next(condition for condition in task.conditions if condition.type_ == "Completed")
    if completed.state == run_v2.Condition.State.CONDITION_SUCCEEDED:
        return "succeeded"
    cancelled = run_v2.Condition.ExecutionReason.CANCELLED
    return "cancelled" if completed.execution_reason == cancelled else "failed"


def _result(status: str, message: str, **code: int) -> Any:
    return run_v2.TaskAttemptResult(status=status_pb2.Status(code=RPC_CODE[status], message=message), **code)


def _signal_of(attempt: Exit) -> int:
    return int(attempt.code - 128) if attempt.code > 128 else int(signal.SIGTERM)
