"""Deployments and ReplicaSets: a number of equal pods, replaced step by step when the template changes."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

from ..kinds import DEPLOYMENT, POD, REPLICA_SET
from ..objects import ALPHABET, DeleteOptions
from ..store import Change, Object
from ..times import seconds
from .loop import Key
from .owned import (
    Tools,
    all_keys,
    condition,
    controller_of,
    delete_pod,
    is_active,
    is_ready,
    make_pod,
    own_keys,
    owned,
    owner_reference,
    set_condition,
)

HASH = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"


class ReplicaSetController:
    """Keeps as many pods as a ReplicaSet says. Pods are its own by owner reference; it adopts none by labels."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def keys(self, change: Change) -> Iterator[Key]:
        return own_keys(REPLICA_SET, change)

    def all_keys(self) -> list[Key]:
        return all_keys(self._tools.store, REPLICA_SET)

    def reconcile(self, key: Key) -> float | None:
        item = self._tools.store.find(REPLICA_SET, *key)
        if item is None:
            return None
        pods = [pod for pod in owned(self._tools.store, POD, item) if is_active(pod)]
        again = None
        if "deletionTimestamp" not in item["metadata"]:
            again = self._fill(item, pods)
            pods = [pod for pod in owned(self._tools.store, POD, item) if is_active(pod)]
        due = self._write(item, pods)
        return min((when for when in (again, due) if when is not None), default=None)

    def _fill(self, item: Object, pods: list[Object]) -> float | None:
        wanted = item["spec"]["replicas"]
        surplus = sorted(pods, key=lambda pod: (is_ready(pod), bool(pod["spec"].get("nodeName"))))
        for pod in surplus[: max(0, len(pods) - wanted)]:
            delete_pod(self._tools, REPLICA_SET, item, pod)
        for _ in range(wanted - len(pods)):
            metadata = {"generateName": f"{item['metadata']['name']}-"}
            if make_pod(self._tools, REPLICA_SET, item, item["spec"]["template"], metadata) is None:
                return self._tools.now() + self._tools.config.restart_seconds
        return None

    def _write(self, item: Object, pods: list[Object]) -> float | None:
        """The counts; answers when the next pod has been ready for long enough."""
        patience = item["spec"].get("minReadySeconds", 0)
        ready_since = [seconds((condition(pod, "Ready") or {})["lastTransitionTime"]) for pod in pods if is_ready(pod)]
        available = [since for since in ready_since if since + patience <= self._tools.now()]
        status: Object = {"replicas": len(pods), "observedGeneration": item["metadata"]["generation"]}
        for field, count in (
            ("fullyLabeledReplicas", len(pods)),
            ("readyReplicas", len(ready_since)),
            ("availableReplicas", len(available)),
        ):
            if count:
                status[field] = count
        self._tools.store.replace(REPLICA_SET, {**item, "status": status})
        return min((since + patience for since in ready_since if since not in available), default=None)


class DeploymentController:
    """Rolls a deployment's ReplicaSets over."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def keys(self, change: Change) -> Iterator[Key]:
        yield from own_keys(DEPLOYMENT, change)
        owner = controller_of(change.item) if change.kind == POD and change.body is None else None
        if owner and (found := self._tools.store.find(REPLICA_SET, change.namespace, owner["name"])):
            # A recreation waits for the last old pod, whose ReplicaSet had stopped counting it.
            yield from own_keys(DEPLOYMENT, Change(change.revision, REPLICA_SET, change.namespace, "", found, None))

    def all_keys(self) -> list[Key]:
        return all_keys(self._tools.store, DEPLOYMENT)

    def reconcile(self, key: Key) -> float | None:
        item = self._tools.store.find(DEPLOYMENT, *key)
        if item is None or "deletionTimestamp" in item["metadata"]:
            return None
        name = f"{item['metadata']['name']}-{template_hash(item['spec']['template'])}"
        sets = owned(self._tools.store, REPLICA_SET, item)
        new = next((one for one in sets if one["metadata"]["name"] == name), None)
        old = [one for one in sets if one is not new]
        if not item["spec"].get("paused"):
            new = self._ensure_new(item, name, new, old)
            if item["spec"]["strategy"]["type"] == "Recreate":
                self._recreate(item, new, old)
            else:
                self._roll(item, new, old)
            self._forget_old(item, old)
        elif new is not None:
            self._scale(item, new, item["spec"]["replicas"] - sum(one["spec"]["replicas"] for one in old))
        return self._write(item, new, old)

    def _ensure_new(self, item: Object, name: str, new: Object | None, old: list[Object]) -> Object:
        """The ReplicaSet of the present template, with the highest revision."""
        revision = max((_revision(one) for one in old), default=0) + 1
        if new is None:
            new = self._create(item, name, revision)
        elif _revision(new) < revision:
            new["metadata"].setdefault("annotations", {})[REVISION] = str(revision)
            new = self._tools.store.replace(REPLICA_SET, new)
        if _revision(item) != _revision(new):
            item["metadata"].setdefault("annotations", {})[REVISION] = str(_revision(new))
        return new

    def _create(self, item: Object, name: str, revision: int) -> Object:
        metadata, spec = item["metadata"], item["spec"]
        label = name.removeprefix(f"{metadata['name']}-")
        template = copy.deepcopy(spec["template"])
        template.setdefault("metadata", {}).setdefault("labels", {})[HASH] = label
        selector = copy.deepcopy(spec["selector"])
        selector.setdefault("matchLabels", {})[HASH] = label
        return self._tools.objects.create(
            REPLICA_SET,
            metadata["namespace"],
            {
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "metadata": {
                    "name": name,
                    "labels": dict(template["metadata"]["labels"]),
                    "annotations": {REVISION: str(revision)},
                    "ownerReferences": [owner_reference(DEPLOYMENT, item)],
                },
                "spec": {
                    "replicas": 0,
                    "selector": selector,
                    "template": template,
                    "minReadySeconds": spec.get("minReadySeconds", 0),
                },
            },
        )

    def _recreate(self, item: Object, new: Object, old: list[Object]) -> None:
        for one in old:
            self._scale(item, one, 0)
        if not any(owned(self._tools.store, POD, one) for one in old):
            self._scale(item, new, item["spec"]["replicas"])

    def _roll(self, item: Object, new: Object, old: list[Object]) -> None:
        """Up within the surge, then down as far as enough pods stay available."""
        wanted = item["spec"]["replicas"]
        surge, unavailable = rollout_bounds(item["spec"])
        present = sum(one["spec"]["replicas"] for one in [new, *old])
        grown = min(wanted, new["spec"]["replicas"] + max(0, wanted + surge - present))
        self._scale(item, new, grown)
        present = sum(one["spec"]["replicas"] for one in [new, *old])
        missing = new["spec"]["replicas"] - new["status"].get("availableReplicas", 0)
        spare = present - (wanted - unavailable) - missing
        # What is not available anyway goes first: it costs nothing.
        for healthy in (False, True):
            for one in old:
                available = one["status"].get("availableReplicas", 0)
                expendable = one["spec"]["replicas"] if healthy else one["spec"]["replicas"] - available
                cut = max(0, min(expendable, spare))
                self._scale(item, one, one["spec"]["replicas"] - cut)
                spare -= cut

    def _scale(self, item: Object, one: Object, replicas: int) -> None:
        if one["spec"]["replicas"] == replicas:
            return
        direction = "up" if replicas > one["spec"]["replicas"] else "down"
        text = f"Scaled {direction} replica set {one['metadata']['name']} from {one['spec']['replicas']} to {replicas}"
        one["spec"]["replicas"] = replicas
        one["metadata"]["generation"] += 1
        self._tools.store.replace(REPLICA_SET, one)
        self._tools.recorder.record(DEPLOYMENT, item, "Normal", "ScalingReplicaSet", text, "deployment-controller")

    def _forget_old(self, item: Object, old: list[Object]) -> None:
        empty = [one for one in old if not one["spec"]["replicas"] and not one["status"].get("replicas")]
        empty.sort(key=_revision)
        for one in empty[: max(0, len(empty) - item["spec"]["revisionHistoryLimit"])]:
            metadata = one["metadata"]
            self._tools.objects.delete(
                REPLICA_SET, metadata["namespace"], metadata["name"], DeleteOptions("Background")
            )

    def _write(self, item: Object, new: Object | None, old: list[Object]) -> float | None:
        """The counts and conditions; answers when a rollout that makes no progress has failed."""
        everyone = [*old, *([new] if new else [])]
        total = {
            field: sum(one["status"].get(field, 0) for one in everyone)
            for field in ("replicas", "readyReplicas", "availableReplicas")
        }
        updated = new["status"].get("replicas", 0) if new else 0
        wanted = item["spec"]["replicas"]
        status = copy.deepcopy(item.get("status", {}))
        before = {field: status.get(field, 0) for field in (*total, "updatedReplicas")}
        missing = max(0, max(wanted, total["replicas"]) - total["availableReplicas"])
        counts = {**total, "updatedReplicas": updated, "unavailableReplicas": missing}
        for field, count in counts.items():
            status.pop(field, None)
            if count:
                status[field] = count
        status["observedGeneration"] = item["metadata"]["generation"]
        now = self._tools.stamp()
        enough = total["availableReplicas"] >= wanted - rollout_bounds(item["spec"])[1]
        reason = "MinimumReplicasAvailable" if enough else "MinimumReplicasUnavailable"
        text = f"Deployment {'has' if enough else 'does not have'} minimum availability."
        old_one = condition({"status": status}, "Available") or {}
        moved = now if old_one.get("status") != str(enough) else old_one.get("lastUpdateTime", now)
        set_condition(status, "Available", str(enough), reason, text, now, lastUpdateTime=moved)
        done = updated == wanted == total["replicas"] == total["availableReplicas"] and new is not None
        progressed = any(counts[field] != value for field, value in before.items())
        due = self._progress(item, status, new, done=done, progressed=progressed)
        self._tools.store.replace(DEPLOYMENT, {**item, "status": status})
        return due

    def _progress(
        self, item: Object, status: Object, new: Object | None, *, done: bool, progressed: bool
    ) -> float | None:
        if item["spec"].get("paused") or new is None:
            return None
        now, name = self._tools.stamp(), new["metadata"]["name"]
        old = condition({"status": status}, "Progressing") or {}
        if done:
            text = f'ReplicaSet "{name}" has successfully progressed.'
            if old.get("message") != text:
                more = {"lastUpdateTime": now}
                set_condition(status, "Progressing", "True", "NewReplicaSetAvailable", text, now, **more)
            return None
        updated = old.get("lastUpdateTime", now)
        about_this = f'"{name}"' in old.get("message", "")
        if about_this and old.get("reason") == "NewReplicaSetAvailable":
            return None  # rolled out: pods that end later are no rollout
        changed = progressed or not about_this
        due: float = seconds(now if changed else updated) + item["spec"]["progressDeadlineSeconds"]
        if not changed and self._tools.now() >= due:
            text = f'ReplicaSet "{name}" has timed out progressing.'
            more = {"lastUpdateTime": updated}
            set_condition(status, "Progressing", "False", "ProgressDeadlineExceeded", text, now, **more)
            return None
        if changed:
            text = f'ReplicaSet "{name}" is progressing.'
            set_condition(status, "Progressing", "True", "ReplicaSetUpdated", text, now, lastUpdateTime=now)
        return due


def template_hash(template: Object) -> str:
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).digest()
    return "".join(ALPHABET[byte % len(ALPHABET)] for byte in digest[:10])


def rollout_bounds(spec: Object) -> tuple[int, int]:
    """(surge, unavailable) as numbers of pods; a recreation may have all of them unavailable."""
    wanted = spec["replicas"]
    rolling = spec["strategy"].get("rollingUpdate")
    if rolling is None:
        return 0, wanted
    surge = _resolve(rolling["maxSurge"], wanted, math.ceil)
    unavailable = min(_resolve(rolling["maxUnavailable"], wanted, math.floor), wanted)
    return surge, unavailable if surge or unavailable else 1  # both round to none: then nothing would ever move


def _resolve(value: int | str, wanted: int, rounding: Any) -> int:
    if isinstance(value, int):
        return value
    return int(rounding(int(value.removesuffix("%")) * wanted / 100))


def _revision(item: Object) -> int:
    return int(item["metadata"].get("annotations", {}).get(REVISION, 0))
