"""A pod's status: what its containers' states add up to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....containers.processes import LOST, OUT_OF_MEMORY, Exit
from ..controllers.owned import set_condition
from ..store import Object
from ..times import timestamp

PARTS = {"initContainers": "initContainerStatuses", "containers": "containerStatuses"}
BACK_OFF = "CrashLoopBackOff"
LOST_TEXT = "The container could not be located when the pod was looked at: it was killed from outside."


def begin(pod: Object, now: str) -> None:
    """The status of a pod that has just come to its node; keeps what is there already."""
    status = pod["status"]
    status.setdefault("startTime", now)
    for key in ("podIP", "hostIP"):
        status.setdefault(key, "127.0.0.1")
    status.setdefault("podIPs", [{"ip": "127.0.0.1"}])
    status.setdefault("hostIPs", [{"ip": "127.0.0.1"}])
    for part, field in PARTS.items():
        if part in pod["spec"] and field not in status:
            status[field] = [_new_status(container) for container in pod["spec"][part]]


def entry(pod: Object, name: str) -> Object:
    """The status of one container."""
    found: Object = next(one for field in PARTS.values() for one in pod["status"].get(field, ()) if one["name"] == name)
    return found


def all_entries(pod: Object) -> list[Object]:
    return [one for field in PARTS.values() for one in pod["status"].get(field, ())]


def terminated(container_id: str, ended: Exit, started_at: str | None, message: str = "") -> Object:
    state: Object = {
        "exitCode": ended.code,
        "reason": _reason(ended),
        "startedAt": started_at or timestamp(ended.at),
        "finishedAt": timestamp(ended.at),
        "containerID": f"dropforge://{container_id}",
    }
    message = message or (LOST_TEXT if ended.reason == LOST else "")
    return {**state, "message": message} if message else state


def settle(pod: Object, now: str, *, phase: str = "", reason: str = "", message: str = "") -> None:
    """Bring phase and conditions in line with the containers' states; `phase` is a last word."""
    status = pod["status"]
    own = status.get("containerStatuses", [])
    initialised = all(
        one.get("state", {}).get("terminated", {}).get("exitCode") == 0
        for one in status.get("initContainerStatuses", ())
    )
    begun = any(one["state"].keys() & {"running", "terminated"} or one.get("lastState") for one in own)
    status["phase"] = phase or ("Running" if begun and initialised else "Pending")
    for key, value in (("reason", reason), ("message", message)):
        if value:
            status[key] = value
    unready = [one["name"] for one in own if not one["ready"]]
    ended = status["phase"] if status["phase"] in ("Succeeded", "Failed") else ""
    why = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(ended, "ContainersNotReady")
    text = "" if ended else f"containers with unready status: [{' '.join(unready)}]"
    waiting = [one["name"] for one in status.get("initContainerStatuses", ()) if not _succeeded(one)]
    if initialised:
        _set(status, "Initialized", True, "PodCompleted" if ended == "Succeeded" else "", "", now)
    else:
        text_of = f"containers with incomplete status: [{' '.join(waiting)}]"
        _set(status, "Initialized", False, "ContainersNotInitialized", text_of, now)
    ready = not unready and not ended and bool(own)
    for kind in ("Ready", "ContainersReady"):
        _set(status, kind, ready, "" if ready else why, "" if ready else text, now)


def verdict(pod: Object) -> str:
    """The phase that a pod without running containers ends in."""
    return "Succeeded" if all(_succeeded(one) for one in pod["status"].get("containerStatuses", ())) else "Failed"


def _succeeded(one: Mapping[str, Any]) -> bool:
    return bool(one.get("state", {}).get("terminated", {}).get("exitCode") == 0)


def _new_status(container: Object) -> Object:
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "started": False,
        "state": {"waiting": {"reason": "PodInitializing"}},
        "lastState": {},
    }


def _reason(ended: Exit) -> str:
    if ended.reason == OUT_OF_MEMORY:
        return "OOMKilled"
    if ended.reason == LOST:
        return "ContainerStatusUnknown"
    return "Error" if ended.code else "Completed"


def _set(status: Object, kind: str, value: bool, reason: str, message: str, now: str) -> None:
    set_condition(status, kind, str(value), reason, message, now, lastProbeTime=None)
