"""Deployments and ReplicaSets: a number of equal pods, which a new template replaces step by step."""

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
    OwnerController,
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


class ReplicaSetController(OwnerController):
    """Keeps the number of pods that a ReplicaSet wants. It owns pods by owner reference; it adopts none by labels."""

    kind = REPLICA_SET

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
        """Write the counts; return when the next pod becomes available by having been ready long enough."""
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


class DeploymentController(OwnerController):
    """Replaces a deployment's old ReplicaSets by the ReplicaSet of its present template."""

    kind = DEPLOYMENT

    def keys(self, change: Change) -> Iterator[Key]:
        yield from own_keys(DEPLOYMENT, change)
        owner = controller_of(change.item) if change.kind == POD and change.body is None else None
        if owner and (replicas := self._tools.store.find(REPLICA_SET, change.namespace, owner["name"])):
            # A recreation waits for the end of the last old pod, which its ReplicaSet no longer counts.
            yield from own_keys(DEPLOYMENT, Change(change.revision, REPLICA_SET, change.namespace, "", replicas, None))

    def reconcile(self, key: Key) -> float | None:
        item = self._tools.store.find(DEPLOYMENT, *key)
        if item is None or "deletionTimestamp" in item["metadata"]:
            return None
        name = f"{item['metadata']['name']}-{template_hash(item['spec']['template'])}"
        sets = owned(self._tools.store, REPLICA_SET, item)
        new = next((replica_set for replica_set in sets if replica_set["metadata"]["name"] == name), None)
        old = [replica_set for replica_set in sets if replica_set is not new]
        if not item["spec"].get("paused"):
            new = self._ensure_new(item, name, new, old)
            if item["spec"]["strategy"]["type"] == "Recreate":
                self._recreate(item, new, old)
            else:
                self._roll(item, new, old)
            self._forget_old(item, old)
        elif new is not None:
            self._scale(
                item, new, item["spec"]["replicas"] - sum(replica_set["spec"]["replicas"] for replica_set in old)
            )
        return self._write(item, new, old)

    def _ensure_new(self, item: Object, name: str, new: Object | None, old: list[Object]) -> Object:
        """The ReplicaSet of the present template, created if missing, with the highest revision."""
        revision = max((_revision(replica_set) for replica_set in old), default=0) + 1
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
        for replica_set in old:
            self._scale(item, replica_set, 0)
        if not any(owned(self._tools.store, POD, replica_set) for replica_set in old):
            self._scale(item, new, item["spec"]["replicas"])

    def _roll(self, item: Object, new: Object, old: list[Object]) -> None:
        """Scale the new ReplicaSet up within the surge, then the old ones down while enough pods stay available."""
        wanted = item["spec"]["replicas"]
        surge, unavailable = rollout_bounds(item["spec"])
        present = sum(replica_set["spec"]["replicas"] for replica_set in [new, *old])
        grown = min(wanted, new["spec"]["replicas"] + max(0, wanted + surge - present))
        self._scale(item, new, grown)
        present = sum(replica_set["spec"]["replicas"] for replica_set in [new, *old])
        missing = new["spec"]["replicas"] - new["status"].get("availableReplicas", 0)
        spare = present - (wanted - unavailable) - missing
        # Remove unavailable pods first: their end costs no availability.
        for healthy in (False, True):
            for replica_set in old:
                available = replica_set["status"].get("availableReplicas", 0)
                expendable = replica_set["spec"]["replicas"] if healthy else replica_set["spec"]["replicas"] - available
                cut = max(0, min(expendable, spare))
                self._scale(item, replica_set, replica_set["spec"]["replicas"] - cut)
                spare -= cut

    def _scale(self, item: Object, replica_set: Object, replicas: int) -> None:
        if replica_set["spec"]["replicas"] == replicas:
            return
        before, name = replica_set["spec"]["replicas"], replica_set["metadata"]["name"]
        text = f"Scaled {'up' if replicas > before else 'down'} replica set {name} from {before} to {replicas}"
        replica_set["spec"]["replicas"] = replicas
        replica_set["metadata"]["generation"] += 1
        self._tools.store.replace(REPLICA_SET, replica_set)
        self._tools.recorder.record(DEPLOYMENT, item, "Normal", "ScalingReplicaSet", text, "deployment-controller")

    def _forget_old(self, item: Object, old: list[Object]) -> None:
        empty = [
            replica_set
            for replica_set in old
            if not replica_set["spec"]["replicas"] and not replica_set["status"].get("replicas")
        ]
        empty.sort(key=_revision)
        for replica_set in empty[: max(0, len(empty) - item["spec"]["revisionHistoryLimit"])]:
            self._tools.objects.delete_item(REPLICA_SET, replica_set, DeleteOptions("Background"))

    def _write(self, item: Object, new: Object | None, old: list[Object]) -> float | None:
        """Write the counts and conditions; return when the rollout fails unless it makes progress."""
        all_sets = [*old, *([new] if new else [])]
        total = {
            field: sum(replica_set["status"].get(field, 0) for replica_set in all_sets)
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
        available = condition({"status": status}, "Available") or {}
        moved = now if available.get("status") != str(enough) else available.get("lastUpdateTime", now)
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
            return None  # the rollout is complete: the end of a pod is not a new rollout
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
    """(surge, unavailable) as numbers of pods; a recreation allows all pods to be unavailable."""
    wanted = spec["replicas"]
    rolling = spec["strategy"].get("rollingUpdate")
    if rolling is None:
        return 0, wanted
    surge = _resolve(rolling["maxSurge"], wanted, math.ceil)
    unavailable = min(_resolve(rolling["maxUnavailable"], wanted, math.floor), wanted)
    return surge, unavailable if surge or unavailable else 1  # both round down to 0: then no pod could ever be replaced


def _resolve(value: int | str, wanted: int, rounding: Any) -> int:
    if isinstance(value, int):
        return value
    return int(rounding(int(value.removesuffix("%")) * wanted / 100))


def _revision(item: Object) -> int:
    return int(item["metadata"].get("annotations", {}).get(REVISION, 0))
