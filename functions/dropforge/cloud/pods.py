"""What the status of a pod, and the events about it, say of a container that does not run: pure readings of JSON.

Kubernetes tries again for ever, so a pod tells why it waits and never that it has failed; these say what no waiting can
mend, and what to answer when the waiting has an end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dropforge.base.errors import CloudError, ErrorClass

from .classify import classify_text

Object = dict[str, Any]

CRASHES = 3  # as often as a container must end before it is called broken; a machine can be lost in between
_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff"})  # for any cause, a busy registry included
_NEVER = frozenset({"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"})
_FORBIDDEN = re.compile(r"denied|forbidden|unauthorized|authorization failed|\b40[13]\b", re.I)
_WRONG = re.compile(r"not found|does not exist|invalid|manifest unknown|\b404\b", re.I)
_OUT_OF_STOCK = re.compile(r"out of resources|out of capacity|stock-?out|resource_pool_exhausted", re.I)
_QUOTA = re.compile(r"quota", re.I)
_IMAGE_HINT = "push the image that the deployment's settings name, and let the nodes' service account read it"
_MEMORY_HINT = "ask for more memory_gib, or for less at once"


def broken(pod: Object, events: list[Object]) -> CloudError | None:
    """Why a pod will never run by waiting; None for one that runs, or may yet."""
    for status in _containers(pod):
        found = _image_problem(pod, status, events) or _crash(pod, status)
        if found is not None:
            return found
    return None


def unschedulable(pod: Object, events: list[Object]) -> CloudError | None:
    """Why no node has been found for a pod; None for one that has a node. That may pass: the caller has the patience.

    GKE says a lack of machines nowhere but in the autoscaler's events.
    """
    condition = condition_of(pod, "PodScheduled")
    if pod["spec"].get("nodeName") or condition is None or condition.get("status") == "True":
        return None
    reason = last_event(events, "FailedScaleUp", "NotTriggerScaleUp", "FailedScheduling")
    message = f"pod {pod['metadata']['name']} has no node: {reason or condition.get('message', 'no reason given')}"
    if _OUT_OF_STOCK.search(reason):
        return _classified("RESOURCE_EXHAUSTED", ErrorClass.STOCKOUT, message)
    if _QUOTA.search(reason):
        return _classified("RESOURCE_EXHAUSTED", ErrorClass.QUOTA, message)
    if _WRONG.search(reason):
        return _classified("NOT_FOUND", ErrorClass.CONFIG, message)
    return _classified("RESOURCE_EXHAUSTED", ErrorClass.STOCKOUT, message)


def waits_for(pod: Object, events: list[Object]) -> str:
    """What a pod that has a node is doing instead of being ready."""
    for status in _containers(pod):
        waiting = status.get("state", {}).get("waiting")
        if waiting:
            return f"container {status['name']} waits: {_text(waiting)}{_after(status)}"
        if not status.get("ready"):
            probe = last_event(events, "Unhealthy")
            return f"container {status['name']} is not ready{f': {probe}' if probe else ''}{_after(status)}"
    return str(pod.get("status", {}).get("message") or pod.get("status", {}).get("phase", "Pending"))


def last_event(events: list[Object], *reasons: str) -> str:
    """The latest event's message, of the first of these reasons that has happened; "" when none has."""
    for reason in reasons:
        found = [event for event in events if event.get("reason") == reason]
        if found:
            return str(max(found, key=_time)["message"])
    return ""


def condition_of(item: Object, kind: str) -> Object | None:
    """A condition of an object's status."""
    return next((one for one in item.get("status", {}).get("conditions") or () if one["type"] == kind), None)


def _image_problem(pod: Object, status: Object, events: list[Object]) -> CloudError | None:
    waiting = status.get("state", {}).get("waiting") or {}
    reason = waiting.get("reason", "")
    if reason not in _IMAGE | _NEVER:
        return None
    text = waiting.get("message", "")
    if reason in _IMAGE and not (_FORBIDDEN.search(text) or _WRONG.search(text)):
        text = last_event(events, "Failed") or text  # a back-off does not repeat its cause
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
    """How a container's last run ended; "" when there was none."""
    ended = status.get("lastState", {}).get("terminated") or status.get("state", {}).get("terminated")
    if not ended:
        return ""
    text = str(ended.get("message", "")).strip()[-500:]
    return f" with exit code {ended.get('exitCode')} ({ended.get('reason', '?')}){f': {text}' if text else ''}"


def _containers(pod: Object) -> Iterator[Object]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _classified(status: str, found: ErrorClass, message: str) -> CloudError:
    """With the hint that the class has elsewhere."""
    return CloudError(found, message, classify_text(status, message).hint)


def _text(waiting: Object) -> str:
    return ": ".join(part for part in (waiting.get("reason", ""), waiting.get("message", "")) if part)


def _time(event: Object) -> str:
    """RFC 3339 times of one zone sort as text."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")
