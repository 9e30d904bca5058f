"""Events that controllers, scheduler and kubelet record about objects. A repeated event only raises its count."""

from __future__ import annotations

import json
import uuid

from dropforge_local.base.clock import Clock

from .kinds import EVENT, Kind
from .store import Object, Store
from .times import timestamp


class Recorder:
    """Writes a cluster's events."""

    def __init__(self, store: Store, clock: Clock, kept_seconds: float) -> None:
        self._store = store
        self._clock = clock
        self._kept_seconds = kept_seconds

    def record(self, kind: Kind, item: Object, event_type: str, reason: str, message: str, component: str) -> None:
        """Record an event about `item`; `event_type` is Normal or Warning."""
        now = timestamp(self._clock.now())
        metadata = item["metadata"]
        namespace = metadata.get("namespace", "default")
        with self._store.db.transaction():
            if known := self._find(namespace, metadata["uid"], reason, message):
                known["count"] += 1
                known["lastTimestamp"] = now
                self._store.replace(EVENT, known)
                return
            self._delete_old(namespace)
            event = {"reason": reason, "message": message, "type": event_type, "source": {"component": component}}
            self._store.insert(EVENT, {**_about(kind, item, namespace, now), **event, "reportingComponent": component})

    def _find(self, namespace: str, uid: str, reason: str, message: str) -> Object | None:
        row = self._store.db.row(
            "SELECT body FROM kubernetes_objects WHERE cluster = ? AND kind = 'events' AND namespace = ?"
            " AND json_extract(body, '$.involvedObject.uid') = ? AND json_extract(body, '$.reason') = ?"
            " AND json_extract(body, '$.message') = ?",
            [self._store.cluster, namespace, uid, reason, message],
        )
        return json.loads(row["body"]) if row else None

    def _delete_old(self, namespace: str) -> None:
        rows = self._store.db.rows(
            "SELECT body FROM kubernetes_objects WHERE cluster = ? AND kind = 'events' AND namespace = ?"
            " AND json_extract(body, '$.lastTimestamp') < ?",
            [self._store.cluster, namespace, timestamp(self._clock.now() - self._kept_seconds)],
        )
        for row in rows:
            self._store.remove(EVENT, json.loads(row["body"]))


def _about(kind: Kind, item: Object, namespace: str, now: str) -> Object:
    """A new event about `item`, without reason and message."""
    metadata = item["metadata"]
    reference = {
        "kind": kind.name,
        "namespace": metadata.get("namespace", ""),
        "name": metadata["name"],
        "uid": metadata["uid"],
        "apiVersion": kind.api_version,
        "resourceVersion": metadata["resourceVersion"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}",
            "namespace": namespace,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": now,
        },
        "involvedObject": {key: value for key, value in reference.items() if value},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "eventTime": None,
        "reportingInstance": "",
    }
