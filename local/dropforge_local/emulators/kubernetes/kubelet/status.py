"""A pod's status, derived from the states of its containers."""

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
    """Set the initial status of a pod on its node; keep an existing status."""
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
    """The status of a container that the pod's status contains."""
    status_entry = find_entry(pod, name)
    assert status_entry is not None
    return status_entry


def find_entry(pod: Object, name: str) -> Object | None:
    """The status of a container; None if the pod's status does not contain it yet."""
    return next((item for item in all_entries(pod) if item["name"] == name), None)


def all_entries(pod: Object) -> list[Object]:
    return [item for field in PARTS.values() for item in pod.get("status", {}).get(field, ())]


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
    """Derive phase and conditions from the containers' states; `phase` is a final phase."""
    status = pod["status"]
    own = status.get("containerStatuses", [])
    initialised = all(
        item.get("state", {}).get("terminated", {}).get("exitCode") == 0
        for item in status.get("initContainerStatuses", ())
    )
    begun = any(item["state"].keys() & {"running", "terminated"} or item.get("lastState") for item in own)
    status["phase"] = phase or ("Running" if begun and initialised else "Pending")
    for key, value in (("reason", reason), ("message", message)):
        if value:
            status[key] = value
    unready = [item["name"] for item in own if not item["ready"]]
    ended = status["phase"] if status["phase"] in ("Succeeded", "Failed") else ""
    why = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(ended, "ContainersNotReady")
    text = "" if ended else f"containers with unready status: [{' '.join(unready)}]"
    waiting = [item["name"] for item in status.get("initContainerStatuses", ()) if not _succeeded(item)]
    if initialised:
        _set(status, "Initialized", True, "PodCompleted" if ended == "Succeeded" else "", "", now)
    else:
        text_of = f"containers with incomplete status: [{' '.join(waiting)}]"
        _set(status, "Initialized", False, "ContainersNotInitialized", text_of, now)
    ready = not unready and not ended and bool(own)
    for kind in ("Ready", "ContainersReady"):
        _set(status, kind, ready, "" if ready else why, "" if ready else text, now)


def verdict(pod: Object) -> str:
    """The final phase of a pod without running containers."""
    return "Succeeded" if all(_succeeded(item) for item in pod["status"].get("containerStatuses", ())) else "Failed"


def _succeeded(item: Mapping[str, Any]) -> bool:
    return bool(item.get("state", {}).get("terminated", {}).get("exitCode") == 0)


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
