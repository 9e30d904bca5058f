"""The status of an attempt, read from the Kubernetes API's answers about its Job, pods and events. Pure functions.

Job conditions and their reasons: https://kubernetes.io/docs/concepts/workloads/controllers/job/
Reasons for the disruption of a pod: https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud import pods
from dropforge.cloud.classify import classify_text
from dropforge.cloud.pods import Object
from dropforge.platforms.training import Phase, Status, class_of_exit

# Reasons of DisruptionTarget for a node that was lost before Kubernetes deleted its pods.
_LOST = frozenset({"DeletionByPodGC", "DeletionByTaintManager"})
# Reasons of a pod whose kubelet knew that the machine shuts down (NodeShutdown: before Kubernetes 1.24).
_SHUTDOWN = frozenset({"Terminated", "NodeShutdown"})
_KILLED = frozenset({137, 143})
_HINTS = {
    ErrorClass.PREEMPTED: "training resumes from its last checkpoint",
    ErrorClass.INFRASTRUCTURE: "training resumes from its last checkpoint",
    ErrorClass.DEADLINE: "raise limits.max_duration or limits.max_cost_usd, or train less; checkpoints are kept",
    ErrorClass.OUT_OF_MEMORY: "raise target.memory_gib, or lower per_device_train_batch_size or shared_memory_gib",
    ErrorClass.CONFIG: "raise target.ephemeral_storage_gib",
}


def status_of_job(job: Object, job_pods: list[Object], nodes: int, events_of: Callable[[str], list[Object]]) -> Status:
    """The status of a Job that needs `nodes` pods.

    `events_of` returns the events about an object by its uid; it is called only for objects that do not run.
    """
    listed = job.get("status", {}).get("conditions") or ()
    conditions = {condition["type"]: condition for condition in listed if condition["status"] == "True"}
    if "Complete" in conditions:
        return Status(Phase.SUCCEEDED, exit_code=0)
    if failed := conditions.get("Failed") or conditions.get("FailureTarget"):
        return _failure(failed, job_pods)
    name = job["metadata"]["name"]
    if "deletionTimestamp" in job["metadata"]:
        return Status(Phase.GONE, f"job {name} is being deleted")
    # Nodes arrive one by one. Each is paid for while the Job waits for the rest.
    is_paid = any(pod["spec"].get("nodeName") for pod in job_pods)
    if len(job_pods) < nodes:
        missing = f"job {name} has {len(job_pods)} of {nodes} pods"
        return replace(_not_created(events_of(job["metadata"]["uid"]), missing), is_paid=is_paid)
    pending = [pod for pod in job_pods if pod["status"].get("phase") == "Pending"]
    for pod in pending:
        if status := _not_running(pod, events_of):
            return replace(status, is_paid=is_paid)
    return Status(Phase.RUNNING, starting=pods.starts(pending[0]) if pending else "")


def _not_created(events: list[Object], missing: str) -> Status:
    """Why the Job has too few pods: admission refuses them, or the controller has not created them yet."""
    refusal = pods.last_event(events, "FailedCreate")
    message = f"{missing}: {refusal}" if refusal else missing
    if not refusal or not re.search(r"forbidden|denied|invalid|not found", refusal, re.I):
        return Status(Phase.PENDING, message, ErrorClass.INFRASTRUCTURE)
    error = classify_text("FAILED_PRECONDITION", message)
    if error.error_class is ErrorClass.CONFIG:
        return _failed(error)
    return Status(Phase.PENDING, message, error.error_class, hint=error.hint)  # the namespace's quota may become free


def _not_running(pod: Object, events_of: Callable[[str], list[Object]]) -> Status | None:
    """Why a pending pod waits; None for a pod that has a node and pulls its image."""
    events = events_of(pod["metadata"]["uid"])
    if error := pods.broken(pod, events):
        return _failed(error)
    if error := pods.unschedulable(pod, events):
        if error.error_class is ErrorClass.CONFIG:
            return _failed(error)
        return Status(Phase.PENDING, error.message, error.error_class, hint=error.hint)
    if not pod["spec"].get("nodeName"):
        return Status(Phase.PENDING, f"pod {pod['metadata']['name']} has not been scheduled")
    if _is_stuck(pod):
        return Status(Phase.PENDING, pods.waits_for(pod, events), ErrorClass.INFRASTRUCTURE)
    return None


def _is_stuck(pod: Object) -> bool:
    """Whether the pod cannot pull its image for a reason that may pass."""
    containers = pod["status"].get("containerStatuses") or ()
    states = [container.get("state", {}).get("waiting") or {} for container in containers]
    return any(state.get("reason") in ("ErrImagePull", "ImagePullBackOff") for state in states)


def _failure(condition: Object, job_pods: list[Object]) -> Status:
    """Why a Job has failed: read from its pods, or from the Job's condition if the pods were deleted."""
    message = f"{condition.get('reason')}: {condition.get('message')}"
    if condition.get("reason") == "DeadlineExceeded":
        return _ended(ErrorClass.DEADLINE, message)
    ends = [_end_of(pod) for pod in job_pods if pod["status"].get("phase") == "Failed"]
    if ends:
        return min(ends, key=_rank)
    if code := re.search(r"failed with exit code (\d+)", message):
        return _ended(class_of_exit(int(code[1])), message, int(code[1]))
    is_preempted = "has condition DisruptionTarget" in message
    return _ended(ErrorClass.PREEMPTED if is_preempted else ErrorClass.INFRASTRUCTURE, message)


def _end_of(pod: Object) -> Status:
    """How a failed pod ended."""
    status, name = pod["status"], pod["metadata"]["name"]
    reason, message = status.get("reason", ""), f"pod {name}: {status.get('reason')}: {status.get('message')}"
    states = [container.get("state", {}).get("terminated") for container in status.get("containerStatuses") or ()]
    bad = next((state for state in states if state and state["exitCode"]), None)
    code, when = (bad["exitCode"], _time(bad.get("finishedAt"))) if bad else (None, None)
    if reason == "Evicted":
        return _ended(_class_of_eviction(message), message, code, when)
    if bad and bad.get("reason") == "OOMKilled":
        return _ended(
            ErrorClass.OUT_OF_MEMORY, f"pod {name} was killed for using more memory than its limit", code, when
        )
    disruption = pods.condition_of(pod, "DisruptionTarget")
    if disruption and disruption.get("status") == "True":
        error_class = ErrorClass.INFRASTRUCTURE if disruption.get("reason") in _LOST else ErrorClass.PREEMPTED
        return _ended(error_class, f"pod {name}: {disruption.get('reason')}: {disruption.get('message')}", code, when)
    if reason in _SHUTDOWN:
        return _ended(ErrorClass.PREEMPTED, message, code, when)
    if bad and bad.get("reason") != "ContainerStatusUnknown":
        error_class, text = class_of_exit(bad["exitCode"]), f"pod {name} failed: {bad.get('reason')}"
        return Status(Phase.FAILED, text, error_class, bad["exitCode"], when)
    return _ended(ErrorClass.INFRASTRUCTURE, message if reason else f"pod {name} was lost", code, when)


def _class_of_eviction(message: str) -> ErrorClass:
    """The class of an eviction, by the resource that the node lacked.

    https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/
    """
    if re.search(r"ephemeral|emptyDir", message):
        return ErrorClass.CONFIG
    return ErrorClass.OUT_OF_MEMORY if "memory" in message else ErrorClass.INFRASTRUCTURE


def _rank(end: Status) -> tuple[bool, float]:
    """Sorts the end that tells the cause first: the earliest one, unless the pod was killed because another failed."""
    when = end.ended.timestamp() if end.ended else float("inf")
    return end.exit_code in _KILLED and end.error_class is ErrorClass.INFRASTRUCTURE, when


def _ended(error_class: ErrorClass, message: str, code: int | None = None, when: datetime | None = None) -> Status:
    return Status(Phase.FAILED, message, error_class, code, when, _HINTS.get(error_class, ""))


def _failed(error: CloudError) -> Status:
    return Status(Phase.FAILED, error.message, error.error_class, hint=error.hint)


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
