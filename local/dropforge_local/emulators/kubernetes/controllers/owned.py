"""Common parts of controllers: keys by owner, finding, creating and deleting owned pods, and conditions."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from dropforge_local.base.clock import Clock

from ..config import KubernetesConfig
from ..kinds import POD, Kind
from ..objects import DeleteOptions, Objects
from ..recorder import Recorder
from ..refusals import Refusal
from ..store import Change, Object, Store
from ..times import timestamp
from .loop import Key


@dataclass(frozen=True)
class Tools:
    """What the controllers of a cluster work with."""

    objects: Objects
    recorder: Recorder
    clock: Clock
    config: KubernetesConfig

    @property
    def store(self) -> Store:
        return self.objects.store

    def now(self) -> float:
        return self.clock.now()

    def stamp(self) -> str:
        return timestamp(self.clock.now())


class OwnerController:
    """A controller of one kind of objects. A change of such an object, or of an object that it owns, wakes it."""

    kind: ClassVar[Kind]

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def keys(self, change: Change) -> Iterator[Key]:
        return own_keys(self.kind, change)

    def all_keys(self) -> list[Key]:
        return all_keys(self._tools.store, self.kind)


def own_keys(kind: Kind, change: Change) -> Iterator[Key]:
    """The key of the changed object, or of its controlling owner, if that is an object of `kind`."""
    if change.kind == kind:
        yield change.namespace, change.name
        return
    for item in (change.body, change.previous):
        owner = controller_of(item) if item else None
        if owner and owner["kind"] == kind.name and owner["apiVersion"] == kind.api_version:
            yield change.namespace, owner["name"]


def all_keys(store: Store, kind: Kind) -> list[Key]:
    return [(item["metadata"].get("namespace", ""), item["metadata"]["name"]) for item in store.items(kind)]


def controller_of(item: Object) -> Object | None:
    references: Iterable[Object] = item["metadata"].get("ownerReferences", ())
    return next((reference for reference in references if reference.get("controller")), None)


def owned(store: Store, kind: Kind, owner: Object) -> list[Object]:
    """The objects of `kind` that `owner` controls, oldest first."""
    uid = owner["metadata"]["uid"]
    items = [item for own_kind, item in store.dependents(uid) if own_kind == kind]
    return sorted((item for item in items if (controller_of(item) or {}).get("uid") == uid), key=_age)


def _age(item: Object) -> tuple[str, int]:
    return item["metadata"]["creationTimestamp"], int(item["metadata"]["resourceVersion"])


def owner_reference(kind: Kind, owner: Object) -> Object:
    metadata = owner["metadata"]
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def make_pod(tools: Tools, kind: Kind, owner: Object, template: Object, metadata: Object) -> Object | None:
    """Create a pod from a template; if the API refuses it, record an event and return None."""
    own = template.get("metadata", {})
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "ownerReferences": [owner_reference(kind, owner)],
            **metadata,
            "labels": {**own.get("labels", {}), **metadata.get("labels", {})},
            "annotations": {**own.get("annotations", {}), **metadata.get("annotations", {})},
        },
        "spec": copy.deepcopy(template["spec"]),
    }
    component = f"{kind.name.lower()}-controller"
    try:
        made = tools.objects.create(POD, owner["metadata"]["namespace"], pod)
    except Refusal as refusal:
        text = f"Error creating: {refusal.message}"
        tools.recorder.record(kind, owner, "Warning", "FailedCreate", text, component)
        return None
    text = f"Created pod: {made['metadata']['name']}"
    tools.recorder.record(kind, owner, "Normal", "SuccessfulCreate", text, component)
    return made


def delete_pod(tools: Tools, kind: Kind, owner: Object, pod: Object) -> None:
    tools.objects.delete_item(POD, pod, DeleteOptions("Background"))
    text = f"Deleted pod: {pod['metadata']['name']}"
    tools.recorder.record(kind, owner, "Normal", "SuccessfulDelete", text, f"{kind.name.lower()}-controller")


def is_finished(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_active(pod: Object) -> bool:
    return not is_finished(pod) and "deletionTimestamp" not in pod["metadata"]


def is_ready(pod: Object) -> bool:
    return condition_status(pod, "Ready") == "True"


def condition(item: Object, kind: str) -> Object | None:
    return next((entry for entry in item.get("status", {}).get("conditions", ()) if entry["type"] == kind), None)


def condition_status(item: Object, kind: str) -> str:
    return str((condition(item, kind) or {}).get("status", ""))


def set_condition(status: Object, kind: str, value: str, reason: str, message: str, now: str, **more: Any) -> None:
    """Set a condition; its transition time changes only with its status."""
    conditions = status.setdefault("conditions", [])
    old = condition({"status": status}, kind)
    since = old["lastTransitionTime"] if old and old["status"] == value else now
    new = {"type": kind, "status": value, "lastTransitionTime": since, **more}
    if reason:
        new["reason"] = reason
    if message:
        new["message"] = message
    if old:
        conditions[conditions.index(old)] = new
    else:
        conditions.append(new)
