"""Why a container does not run, from its pod's status and events: pure functions on JSON.

Kubernetes retries forever: a pod reports why it waits, but never that it has failed. These functions distinguish
permanent problems from waiting, and say why the pod waited when the caller stops waiting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dropforge.base.errors import CloudError, ErrorClass

from .classify import classify_text

Object = dict[str, Any]

CRASHES = 3  # a container that ends this often is broken; fewer ends may come from lost machines
_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff"})  # any cause, even a busy registry
_NEVER = frozenset({"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"})
_FORBIDDEN = re.compile(r"denied|forbidden|unauthorized|authorization failed|\b40[13]\b", re.I)
_WRONG = re.compile(r"not found|does not exist|invalid|manifest unknown|\b404\b", re.I)
_IMAGE_HINT = "push the image that the deployment's settings name, and let the nodes' service account read it"
_MEMORY_HINT = "ask for more memory_gib, or for less at once"


def broken(pod: Object, events: list[Object]) -> CloudError | None:
    """Why a pod will never run; None if it runs, or may still run."""
    for status in _containers(pod):
        problem = _image_problem(pod, status, events) or _crash(pod, status)
        if problem is not None:
            return problem
    return None


def unschedulable(pod: Object, events: list[Object]) -> CloudError | None:
    """Why a pod has no node; None if it has one. Waiting may help: the caller decides how long.

    GKE reports a lack of machines only in the autoscaler's events.
    """
    condition = condition_of(pod, "PodScheduled")
    if pod["spec"].get("nodeName") or condition is None or condition.get("status") == "True":
        return None
    reason = last_event(events, "FailedScaleUp", "NotTriggerScaleUp", "FailedScheduling")
    message = f"pod {pod['metadata']['name']} has no node: {reason or condition.get('message', 'no reason given')}"
    # Without a word that says otherwise, machines are lacking.
    return classify_text("INVALID_ARGUMENT" if _WRONG.search(reason) else "RESOURCE_EXHAUSTED", message)


def waits_for(pod: Object, events: list[Object]) -> str:
    """Why a pod with a node is not ready."""
    for status in _containers(pod):
        waiting = status.get("state", {}).get("waiting")
        if waiting:
            return f"container {status['name']} waits: {_text(waiting)}{_after(status)}"
        if not status.get("ready"):
            probe = last_event(events, "Unhealthy")
            return f"container {status['name']} is not ready{f': {probe}' if probe else ''}{_after(status)}"
    return str(pod.get("status", {}).get("message") or pod.get("status", {}).get("phase", "Pending"))


def starts(pod: Object) -> str:
    """What a pod on a node does before its containers run: it pulls an image, or attaches a volume."""
    return f"pod {pod['metadata']['name']} is on a node: {waits_for(pod, [])}"


def last_event(events: list[Object], *reasons: str) -> str:
    """The message of the latest event with the first reason in `reasons` that has events; "" if there is no event."""
    for reason in reasons:
        matching = [event for event in events if event.get("reason") == reason]
        if matching:
            return str(max(matching, key=_time)["message"])
    return ""


def condition_of(item: Object, kind: str) -> Object | None:
    """The condition of that type in an object's status; None if the status has no such condition."""
    conditions = item.get("status", {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == kind), None)


def _image_problem(pod: Object, status: Object, events: list[Object]) -> CloudError | None:
    waiting = status.get("state", {}).get("waiting") or {}
    reason = waiting.get("reason", "")
    if reason not in _IMAGE | _NEVER:
        return None
    text = waiting.get("message", "")
    if reason in _IMAGE and not (_FORBIDDEN.search(text) or _WRONG.search(text)):
        text = last_event(events, "Failed") or text  # the back-off message does not repeat the cause
    message = f"pod {pod['metadata']['name']} cannot start {status['image']}: {reason}: {text}"
    if _FORBIDDEN.search(text):
        return CloudError(ErrorClass.PERMISSION, message, _IMAGE_HINT)
    if reason in _NEVER or _WRONG.search(text):
        return CloudError(ErrorClass.CONFIG, message, _IMAGE_HINT)
    return None


def _crash(pod: Object, status: Object) -> CloudError | None:
    ended = status.get("lastState", {}).get("terminated") or status.get("state", {}).get("terminated")
    if not ended:
        return None
    times = status.get("restartCount", 0)
    message = f"container {status['name']} of pod {pod['metadata']['name']} ended{_after(status)}"
    if ended.get("reason") == "OOMKilled":
        return CloudError(ErrorClass.OUT_OF_MEMORY, message, _MEMORY_HINT)
    if times < CRASHES:
        return None
    return CloudError(ErrorClass.CODE, f"{message}, and {times} times in all", "see its log")


def _after(status: Object) -> str:
    """How the container's last run ended; "" if it has not ended yet."""
    ended = status.get("lastState", {}).get("terminated") or status.get("state", {}).get("terminated")
    if not ended:
        return ""
    text = str(ended.get("message", "")).strip()[-500:]
    return f" with exit code {ended.get('exitCode')} ({ended.get('reason', '?')}){f': {text}' if text else ''}"


def _containers(pod: Object) -> Iterator[Object]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _text(waiting: Object) -> str:
    return ": ".join(part for part in (waiting.get("reason", ""), waiting.get("message", "")) if part)


def _time(event: Object) -> str:
    """The time of an event as text. RFC 3339 times of one time zone sort as text."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")
