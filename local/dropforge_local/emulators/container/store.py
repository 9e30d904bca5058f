"""Clusters and their operations, in SQLite."""

from __future__ import annotations

import uuid
from typing import Any

from google.cloud import container_v1
from google.protobuf import json_format

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

SCHEMA = """
CREATE TABLE IF NOT EXISTS container_clusters (
  name TEXT PRIMARY KEY, parent TEXT NOT NULL, created REAL NOT NULL, body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS container_operations (
  name TEXT PRIMARY KEY, parent TEXT NOT NULL, created REAL NOT NULL, target TEXT NOT NULL, done INTEGER NOT NULL,
  body TEXT NOT NULL
);
"""

Cluster = container_v1.Cluster.pb()
Operation = container_v1.Operation.pb()


class Store:
    """Messages by full resource name (projects/P/locations/L/clusters/C)."""

    def __init__(self, db: Database) -> None:
        self.db = db
        db.connection.executescript(SCHEMA)

    def find_cluster(self, name: str) -> Any | None:
        row = self.db.connection.execute("SELECT body FROM container_clusters WHERE name = ?", [name]).fetchone()
        return json_format.Parse(row["body"], Cluster()) if row else None

    def get_cluster(self, name: str) -> Any:
        if (cluster := self.find_cluster(name)) is None:
            raise ApiError("NOT_FOUND", f"Not found: {name}.")
        return cluster

    def clusters(self, parent: str) -> list[Any]:
        """Of one location, or of all for "-"."""
        pattern = parent.removesuffix("-") + "*" if parent.endswith("/-") else parent
        rows = self.db.connection.execute(
            "SELECT body FROM container_clusters WHERE parent GLOB ? ORDER BY created", [pattern]
        )
        return [json_format.Parse(row["body"], Cluster()) for row in rows]

    def put_cluster(self, name: str, cluster: Any, created: float = 0.0) -> None:
        parent, body = name.rsplit("/clusters/", 1)[0], json_format.MessageToJson(cluster)
        with self.db.transaction() as connection:
            connection.execute(
                "INSERT INTO container_clusters VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET body = ?",
                [name, parent, created, body, body],
            )

    def delete_cluster(self, name: str) -> None:
        with self.db.transaction() as connection:
            connection.execute("DELETE FROM container_clusters WHERE name = ?", [name])

    def add_operation(self, operation: Any, parent: str, target: str, created: float) -> str:
        """Store a new operation under a name of its own; that name in full."""
        operation.name = f"operation-{int(created * 1000)}-{uuid.uuid4()}"
        name = f"{parent}/operations/{operation.name}"
        with self.db.transaction() as connection:
            connection.execute(
                "INSERT INTO container_operations VALUES (?, ?, ?, ?, 0, ?)",
                [name, parent, created, target, json_format.MessageToJson(operation)],
            )
        return name

    def get_operation(self, name: str) -> Any:
        row = self.db.connection.execute("SELECT body FROM container_operations WHERE name = ?", [name]).fetchone()
        if row is None:
            raise ApiError("NOT_FOUND", f"Not found: {name}.")
        return json_format.Parse(row["body"], Operation())

    def put_operation(self, name: str, operation: Any) -> None:
        done = operation.status == container_v1.Operation.Status.DONE
        with self.db.transaction() as connection:
            connection.execute(
                "UPDATE container_operations SET body = ?, done = ? WHERE name = ?",
                [json_format.MessageToJson(operation), done, name],
            )

    def operations(self, parent: str) -> list[Any]:
        pattern = parent.removesuffix("-") + "*" if parent.endswith("/-") else parent
        rows = self.db.connection.execute(
            "SELECT body FROM container_operations WHERE parent GLOB ? ORDER BY created DESC LIMIT 100", [pattern]
        )
        return [json_format.Parse(row["body"], Operation()) for row in rows]

    def unfinished(self, target: str = "") -> list[tuple[str, str, float]]:
        """(name, target, created) of operations that are not done; on one cluster, or on all."""
        rows = self.db.connection.execute(
            "SELECT name, target, created FROM container_operations WHERE NOT done AND ? IN ('', target)", [target]
        )
        return [(row["name"], row["target"], row["created"]) for row in rows]
