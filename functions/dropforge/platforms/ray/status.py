"""The status of an attempt, read from its RayJob: the operator's jobDeploymentStatus and Ray's jobStatus.

States and reasons: https://github.com/ray-project/kuberay/blob/master/ray-operator/apis/ray/v1/rayjob_types.go
"""

from __future__ import annotations

import re
from datetime import datetime

from dropforge.base.errors import ErrorClass
from dropforge.cloud.pods import Object
from dropforge.platforms.training import Phase, Status, class_of_exit

_WAITING = ("", "Initializing", "Suspending", "Suspended", "Waiting")
_EXIT = re.compile(r"failed with exit code (\d+)")
_REASONS = {
    "DeadlineExceeded": ErrorClass.DEADLINE,
    "PreRunningDeadlineExceeded": ErrorClass.STOCKOUT,
    "SubmissionFailed": ErrorClass.INFRASTRUCTURE,
    "JobStatusCheckTimeoutExceeded": ErrorClass.INFRASTRUCTURE,
    "JobDeploymentStatusTransitionGracePeriodExceeded": ErrorClass.INFRASTRUCTURE,
    "ValidationFailed": ErrorClass.CONFIG,
}
_HINTS = {
    ErrorClass.DEADLINE: "raise limits.max_duration or limits.max_cost_usd, or train less; checkpoints are kept",
    ErrorClass.INFRASTRUCTURE: "training resumes from its last checkpoint",
    ErrorClass.STOCKOUT: "add placements in other regions",
}


def status_of_ray_job(job: Object) -> Status:
    """The status of a RayJob. An unknown state counts as running until the attempt's deadline."""
    name, status = job["metadata"]["name"], job.get("status") or {}
    if "deletionTimestamp" in job["metadata"]:
        return Status(Phase.GONE, f"RayJob {name} is being deleted")
    deployment, state = status.get("jobDeploymentStatus") or "", status.get("jobStatus") or ""
    if deployment in _WAITING:
        return Status(Phase.PENDING, f"RayJob {name} is {deployment or 'not seen by the Ray operator yet'}")
    if deployment == "Complete" and state == "SUCCEEDED":
        return Status(Phase.SUCCEEDED, exit_code=0, ended=_ended(status))
    if deployment == "Complete" and status.get("reason") not in _REASONS:
        message = f"RayJob {name} ended with job status {state or 'unknown'}: a user stopped it"
        return _failed(ErrorClass.INFRASTRUCTURE, message, status)
    if deployment in ("Complete", "Failed", "ValidationFailed"):
        return _failure(name, deployment, status)
    return Status(Phase.RUNNING)


def _failure(name: str, deployment: str, status: Object) -> Status:
    reason, text = status.get("reason") or "", status.get("message") or ""
    message = f"RayJob {name}: {reason or deployment}: {text}"
    if code := _EXIT.search(text):
        return _failed(class_of_exit(int(code[1])), message, status, int(code[1]))
    # AppFailed without an exit code: the driver was lost with its node.
    error_class = _REASONS.get(deployment) or _REASONS.get(reason, ErrorClass.INFRASTRUCTURE)
    return _failed(error_class, message, status)


def _failed(error_class: ErrorClass, message: str, status: Object, code: int | None = None) -> Status:
    return Status(Phase.FAILED, message, error_class, code, _ended(status), _HINTS.get(error_class, ""))


def _ended(status: Object) -> datetime | None:
    return datetime.fromisoformat(status["endTime"]) if status.get("endTime") else None
