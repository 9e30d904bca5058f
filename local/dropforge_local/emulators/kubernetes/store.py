"""Objects of all clusters in SQLite, with the history of changes for watches and consistent lists."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from dropforge_local.base.db import Database

from .kinds import BY_KEY, Kind

SCHEMA = """
CREATE TABLE IF NOT EXISTS kubernetes_clusters (
  name TEXT PRIMARY KEY, port INTEGER NOT NULL UNIQUE, revision INTEGER NOT NULL DEFAULT 0,
  compacted INTEGER NOT NULL DEFAULT 0, authority TEXT NOT NULL, server TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS kubernetes_objects (
  cluster TEXT NOT NULL REFERENCES kubernetes_clusters (name) ON DELETE CASCADE, kind TEXT NOT NULL,
  namespace TEXT NOT NULL, name TEXT NOT NULL, uid TEXT NOT NULL, body TEXT NOT NULL,
  PRIMARY KEY (cluster, kind, namespace, name)
);
CREATE INDEX IF NOT EXISTS kubernetes_objects_by_uid ON kubernetes_objects (cluster, uid);
CREATE INDEX IF NOT EXISTS kubernetes_events_by_uid ON kubernetes_objects
  (cluster, namespace, json_extract(body, '$.involvedObject.uid')) WHERE kind = 'events';
CREATE INDEX IF NOT EXISTS kubernetes_events_by_age ON kubernetes_objects
  (cluster, namespace, json_extract(body, '$.lastTimestamp')) WHERE kind = 'events';
CREATE TABLE IF NOT EXISTS kubernetes_changes (
  cluster TEXT NOT NULL REFERENCES kubernetes_clusters (name) ON DELETE CASCADE, revision INTEGER NOT NULL,
  kind TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL, body TEXT, previous TEXT,
  PRIMARY KEY (cluster, revision)
);
CREATE TABLE IF NOT EXISTS kubernetes_owners (
  cluster TEXT NOT NULL REFERENCES kubernetes_clusters (name) ON DELETE CASCADE, owner TEXT NOT NULL,
  kind TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL,
  PRIMARY KEY (cluster, owner, kind, namespace, name)
);
CREATE TABLE IF NOT EXISTS kubernetes_containers (
  id TEXT PRIMARY KEY, cluster TEXT NOT NULL, namespace TEXT NOT NULL, pod TEXT NOT NULL, pod_uid TEXT NOT NULL,
  container TEXT NOT NULL, attempt INTEGER NOT NULL, workload TEXT NOT NULL, started REAL NOT NULL,
  ended INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS kubernetes_containers_by_workload ON kubernetes_containers (cluster, workload);
CREATE INDEX IF NOT EXISTS kubernetes_containers_by_pod ON kubernetes_containers (pod_uid, container, attempt);
CREATE TABLE IF NOT EXISTS kubernetes_ports (
  cluster TEXT NOT NULL, owner TEXT NOT NULL, port INTEGER NOT NULL, local INTEGER NOT NULL UNIQUE,
  PRIMARY KEY (cluster, owner, port)
);
CREATE TABLE IF NOT EXISTS kubernetes_settings (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""

Object = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A write of an object: `body` is None after a removal, `previous` is None for a creation."""

    revision: int
    kind: Kind
    namespace: str
    name: str
    body: Object | None
    previous: Object | None

    @property
    def item(self) -> Object:
        item = self.body or self.previous
        assert item is not None
        return item


class Store:
    """A cluster's objects. Each write is a transaction, or joins the open transaction."""

    def __init__(self, db: Database, cluster: str, history: int) -> None:
        self.db = db
        self.cluster = cluster
        self._history = history
        self._changed = asyncio.Event()
        self.on_change: Callable[[Change], None] = lambda change: None  # called after each commit

    def revision(self) -> int:
        return int(self._row()["revision"])

    def compacted(self) -> int:
        """The newest deleted revision: reads as of this revision or an earlier revision are impossible."""
        return int(self._row()["compacted"])

    def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        row = self.db.row(
            "SELECT body FROM kubernetes_objects WHERE cluster = ? AND kind = ? AND namespace = ? AND name = ?",
            [self.cluster, kind.key, namespace, name],
        )
        return json.loads(row["body"]) if row else None

    def latest(self, kind: Kind, item: Object) -> Object | None:
        """The stored state of `item`; None if it was deleted, also if another object has its name now."""
        stored = self.find(kind, item["metadata"].get("namespace", ""), item["metadata"]["name"])
        return stored if stored and stored["metadata"]["uid"] == item["metadata"]["uid"] else None

    def items(self, kind: Kind, namespace: str = "", at: int | None = None) -> list[Object]:
        """Objects ordered by namespace and name: of all namespaces if `namespace` is empty; as of revision `at`."""
        rows = self.db.rows(
            "SELECT namespace, name, body FROM kubernetes_objects WHERE cluster = ? AND kind = ?"
            " AND ? IN ('', namespace)",
            [self.cluster, kind.key, namespace],
        )
        bodies = {(row["namespace"], row["name"]): row["body"] for row in rows}
        if at is not None:
            self._rewind(bodies, kind, namespace, at)
        return [json.loads(bodies[key]) for key in sorted(bodies)]

    def insert(self, kind: Kind, item: Object) -> Object:
        return self._write(kind, item, None)

    def replace(self, kind: Kind, item: Object) -> Object:
        """Write an existing object; do nothing if its content is unchanged."""
        metadata = item["metadata"]
        previous = self.find(kind, metadata.get("namespace", ""), metadata["name"])
        assert previous is not None
        if previous == {**item, "metadata": {**metadata, "resourceVersion": previous["metadata"]["resourceVersion"]}}:
            return previous
        return self._write(kind, item, previous)

    def remove(self, kind: Kind, item: Object) -> None:
        metadata = item["metadata"]
        key = [self.cluster, kind.key, metadata.get("namespace", ""), metadata["name"]]
        with self.db.transaction() as connection:
            connection.execute(
                "DELETE FROM kubernetes_objects WHERE cluster = ? AND kind = ? AND namespace = ? AND name = ?", key
            )
            connection.execute(
                "DELETE FROM kubernetes_owners WHERE cluster = ? AND kind = ? AND namespace = ? AND name = ?", key
            )
            metadata["resourceVersion"] = str(self._next_revision())
            self._record(kind, metadata, None, item)

    def exists(self, uid: str) -> bool:
        row = self.db.row("SELECT 1 FROM kubernetes_objects WHERE cluster = ? AND uid = ?", [self.cluster, uid])
        return row is not None

    def dependents(self, uid: str) -> list[tuple[Kind, Object]]:
        """Objects with an owner reference to `uid`."""
        rows = self.db.rows(
            "SELECT kind, body FROM kubernetes_owners JOIN kubernetes_objects USING (cluster, kind, namespace, name)"
            " WHERE cluster = ? AND owner = ?",
            [self.cluster, uid],
        )
        return [(BY_KEY[row["kind"]], json.loads(row["body"])) for row in rows]

    def owners(self) -> list[str]:
        """The uids that owner references of any object name."""
        rows = self.db.rows("SELECT DISTINCT owner FROM kubernetes_owners WHERE cluster = ?", [self.cluster])
        return [row["owner"] for row in rows]

    def changes(self, after: int, kind: Kind, namespace: str = "") -> list[Change]:
        rows = self.db.rows(
            "SELECT * FROM kubernetes_changes WHERE cluster = ? AND revision > ? AND kind = ? AND ? IN ('', namespace)"
            " ORDER BY revision",
            [self.cluster, after, kind.key, namespace],
        )
        return [_change(row) for row in rows]

    def changed(self) -> Awaitable[object]:
        """Wait for the first commit after this call, even if the caller awaits the result later."""
        return self._changed.wait()

    def _row(self) -> sqlite3.Row:
        return self.db.rows("SELECT * FROM kubernetes_clusters WHERE name = ?", [self.cluster])[0]

    def _rewind(self, bodies: dict[tuple[str, str], str], kind: Kind, namespace: str, at: int) -> None:
        rows = self.db.rows(
            "SELECT namespace, name, previous FROM kubernetes_changes"
            " WHERE cluster = ? AND revision > ? AND kind = ? AND ? IN ('', namespace) ORDER BY revision DESC",
            [self.cluster, at, kind.key, namespace],
        )
        for row in rows:
            key = (row["namespace"], row["name"])
            if row["previous"] is None:
                bodies.pop(key, None)
            else:
                bodies[key] = row["previous"]

    def _write(self, kind: Kind, item: Object, previous: Object | None) -> Object:
        metadata = item["metadata"]
        key = [self.cluster, kind.key, metadata.get("namespace", ""), metadata["name"]]
        with self.db.transaction() as connection:
            metadata["resourceVersion"] = str(self._next_revision())
            connection.execute(
                "INSERT OR REPLACE INTO kubernetes_objects VALUES (?, ?, ?, ?, ?, ?)",
                [*key, metadata["uid"], json.dumps(item)],
            )
            connection.execute(
                "DELETE FROM kubernetes_owners WHERE cluster = ? AND kind = ? AND namespace = ? AND name = ?", key
            )
            owners = {reference["uid"] for reference in metadata.get("ownerReferences", ())}
            connection.executemany(
                "INSERT INTO kubernetes_owners (cluster, kind, namespace, name, owner) VALUES (?, ?, ?, ?, ?)",
                [[*key, owner] for owner in owners],
            )
            self._record(kind, metadata, item, previous)
        return item

    def _next_revision(self) -> int:
        connection = self.db.connection
        connection.execute("UPDATE kubernetes_clusters SET revision = revision + 1 WHERE name = ?", [self.cluster])
        revision = self.revision()
        if revision % 64 == 0 and (oldest := revision - self._history) > 0:
            connection.execute(
                "DELETE FROM kubernetes_changes WHERE cluster = ? AND revision <= ?", [self.cluster, oldest]
            )
            connection.execute("UPDATE kubernetes_clusters SET compacted = ? WHERE name = ?", [oldest, self.cluster])
        return revision

    def _record(self, kind: Kind, metadata: Object, body: Object | None, previous: Object | None) -> None:
        self.db.connection.execute(
            "INSERT INTO kubernetes_changes VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                self.cluster,
                int(metadata["resourceVersion"]),
                kind.key,
                metadata.get("namespace", ""),
                metadata["name"],
                json.dumps(body) if body is not None else None,
                json.dumps(previous) if previous is not None else None,
            ],
        )
        revision = int(metadata["resourceVersion"])
        change = Change(revision, kind, metadata.get("namespace", ""), metadata["name"], body, previous)
        self.db.after_commit(lambda: self._announce(change))

    def _announce(self, change: Change) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change(change)


def _change(row: sqlite3.Row) -> Change:
    body, previous = (json.loads(row[key]) if row[key] is not None else None for key in ("body", "previous"))
    return Change(row["revision"], BY_KEY[row["kind"]], row["namespace"], row["name"], body, previous)
