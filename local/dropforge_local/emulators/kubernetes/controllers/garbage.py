"""Garbage collection by owner references, and the deletion of a deleted namespace's objects."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..kinds import BY_KEY, KINDS, NAMESPACE, Kind
from ..objects import FOREGROUND, ORPHAN, DeleteOptions
from ..store import Change, Object
from .loop import Key
from .owned import Tools, all_keys


class GarbageCollector:
    """Its keys are ("", uid) of deleted objects, or objects in deletion, that have or had dependents."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def keys(self, change: Change) -> Iterator[Key]:
        if change.body is None or "deletionTimestamp" in change.body["metadata"]:
            yield "", change.item["metadata"]["uid"]
        if change.body is None or change.previous is None:
            for reference in change.item["metadata"].get("ownerReferences", ()):
                yield "", reference["uid"]

    def all_keys(self) -> list[Key]:
        rows = self._tools.store.db.rows(
            "SELECT uid FROM kubernetes_objects WHERE cluster = ?"
            " AND json_extract(body, '$.metadata.deletionTimestamp') IS NOT NULL",
            [self._tools.store.cluster],
        )
        return [("", row["uid"]) for row in rows] + [("", uid) for uid in self._tools.store.owners()]

    def reconcile(self, key: Key) -> None:
        uid = key[1]
        stored = self._find(uid)
        if stored is None:
            for kind, dependent in self._tools.store.dependents(uid):
                self._drop_owner(kind, dependent, uid)
            return
        kind, owner = stored
        finalizers = owner["metadata"].get("finalizers", [])
        if "deletionTimestamp" not in owner["metadata"]:
            return
        if ORPHAN in finalizers:
            for dependent_kind, dependent in self._tools.store.dependents(uid):
                self._strip(dependent_kind, dependent, uid)
            self._tools.objects.remove_finalizer(kind, owner, ORPHAN)
        elif FOREGROUND in finalizers and not self._delete_blocking(uid):
            self._tools.objects.remove_finalizer(kind, owner, FOREGROUND)

    def _drop_owner(self, kind: Kind, item: Object, uid: str) -> None:
        """Delete an object without remaining owners; otherwise remove its reference to the deleted owner."""
        others = {reference["uid"] for reference in item["metadata"]["ownerReferences"]} - {uid}
        if any(map(self._tools.store.exists, others)):
            self._strip(kind, item, uid)
        elif "deletionTimestamp" not in item["metadata"]:
            self._delete(kind, item, "Background")

    def _delete_blocking(self, uid: str) -> bool:
        """Delete the dependents; return whether a dependent that blocks the owner's deletion still exists."""
        for kind, dependent in self._tools.store.dependents(uid):
            if "deletionTimestamp" not in dependent["metadata"]:
                self._delete(kind, dependent, "Foreground")
        return any(
            reference.get("blockOwnerDeletion")
            for _, dependent in self._tools.store.dependents(uid)
            for reference in dependent["metadata"]["ownerReferences"]
            if reference["uid"] == uid
        )

    def _strip(self, kind: Kind, item: Object, uid: str) -> None:
        left = [reference for reference in item["metadata"]["ownerReferences"] if reference["uid"] != uid]
        item["metadata"]["ownerReferences"] = left
        if not left:
            del item["metadata"]["ownerReferences"]
        self._tools.store.replace(kind, item)

    def _delete(self, kind: Kind, item: Object, policy: str) -> None:
        self._tools.objects.delete_item(kind, item, DeleteOptions(policy, uid=item["metadata"]["uid"]))

    def _find(self, uid: str) -> tuple[Kind, Object] | None:
        row = self._tools.store.db.row(
            "SELECT kind, body FROM kubernetes_objects WHERE cluster = ? AND uid = ?", [self._tools.store.cluster, uid]
        )
        return (BY_KEY[row["kind"]], json.loads(row["body"])) if row else None


class NamespaceController:
    """Deletes the objects of a namespace that is being deleted, then the namespace itself."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def keys(self, change: Change) -> Iterator[Key]:
        if change.kind == NAMESPACE:
            yield "", change.name
        elif change.body is None and change.namespace:
            yield "", change.namespace

    def all_keys(self) -> list[Key]:
        return all_keys(self._tools.store, NAMESPACE)

    def reconcile(self, key: Key) -> None:
        namespace = self._tools.store.find(NAMESPACE, *key)
        if namespace is None or "deletionTimestamp" not in namespace["metadata"]:
            return
        left = 0
        for kind in (known for known in KINDS if known.namespaced):
            for item in self._tools.store.items(kind, key[1]):
                left += 1
                if "deletionTimestamp" not in item["metadata"]:
                    _, is_deleted = self._tools.objects.delete_item(kind, item, DeleteOptions("Background"))
                    left -= is_deleted
        if not left:
            namespace["spec"]["finalizers"] = []
            self._tools.objects.settle(NAMESPACE, namespace)
