"""Nodes, queued resources, operations, boots and the fault switches, in SQLite."""

from __future__ import annotations

import sqlite3
import uuid
from typing import Any

from google.cloud import tpu_v2
from google.longrunning import operations_pb2
from google.protobuf import json_format

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from . import pages

SCHEMA = """
CREATE TABLE IF NOT EXISTS tpu_nodes (
  name TEXT PRIMARY KEY, parent TEXT NOT NULL, created REAL NOT NULL, uid TEXT NOT NULL, port INTEGER NOT NULL,
  boot INTEGER NOT NULL, ready REAL, maintenance TEXT NOT NULL, body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS tpu_queued (
  name TEXT PRIMARY KEY, parent TEXT NOT NULL, created REAL NOT NULL, entered REAL NOT NULL, body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS tpu_operations (
  name TEXT PRIMARY KEY, parent TEXT NOT NULL, created REAL NOT NULL, verb TEXT NOT NULL, target TEXT NOT NULL,
  request TEXT NOT NULL, done INTEGER NOT NULL, body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS tpu_boots (
  id TEXT PRIMARY KEY, node TEXT NOT NULL, started REAL NOT NULL, ended INTEGER NOT NULL
);
"""
Node = tpu_v2.Node.pb()
QueuedResource = tpu_v2.QueuedResource.pb()
Operation = operations_pb2.Operation
# What has a location and is listed: its table, its message, and whether the newest comes first.
LISTED = {
    "nodes": ("tpu_nodes", Node, False),
    "queued": ("tpu_queued", QueuedResource, False),
    "operations": ("tpu_operations", Operation, True),
}


class Store:
    """Messages by full resource name (projects/P/locations/Z/nodes/N)."""

    def __init__(self, db: Database) -> None:
        self.db = db
        db.connection.executescript(SCHEMA)

    def node_row(self, name: str) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self.db.connection.execute(
            "SELECT * FROM tpu_nodes WHERE name = ?", [name]
        ).fetchone()
        return row

    def find_node(self, name: str) -> Any | None:
        row = self.node_row(name)
        return json_format.Parse(row["body"], Node()) if row else None

    def get_node(self, name: str) -> Any:
        if (node := self.find_node(name)) is None:
            raise ApiError("NOT_FOUND", f"Resource '{name}' was not found")
        return node

    def add_node(self, node: Any, created: float, port: int) -> None:
        values = [node.name, node.name.rsplit("/nodes/", 1)[0], created, uuid.uuid4().hex, port, _dump(node)]
        self.db.connection.execute("INSERT INTO tpu_nodes VALUES (?, ?, ?, ?, ?, 0, NULL, 'NONE', ?)", values)

    def put_node(self, node: Any) -> None:
        with self.db.transaction() as connection:
            connection.execute("UPDATE tpu_nodes SET body = ? WHERE name = ?", [_dump(node), node.name])

    def set_node(self, name: str, **columns: Any) -> None:
        """Set what is not in the message: boot, ready (Unix seconds), maintenance (the metadata server's word)."""
        assignments = ", ".join(f"{column} = ?" for column in columns)
        with self.db.transaction() as connection:
            connection.execute(f"UPDATE tpu_nodes SET {assignments} WHERE name = ?", [*columns.values(), name])

    def delete_node(self, name: str) -> None:
        with self.db.transaction() as connection:
            connection.execute("DELETE FROM tpu_nodes WHERE name = ?", [name])

    def page(self, kind: str, parent: str, request: Any) -> tuple[list[Any], str]:
        """A page of a location's list ("-": of all locations), and the token of the next one.

        In the order of creation; what comes and goes between pages moves nothing.
        """
        table, message, newest_first = LISTED[kind]
        after, order = ("<", "DESC") if newest_first else (">", "ASC")
        size, last = pages.size_of(request), pages.read_token(request, (1e99 if newest_first else 0.0, ""))
        rows = self.db.connection.execute(
            f"SELECT created, name, body FROM {table} WHERE parent GLOB ? AND (created, name) {after} (?, ?)"
            f" ORDER BY created {order}, name {order} LIMIT ?",
            [_pattern(parent), *last, size + 1],
        ).fetchall()
        token = pages.write_token(rows[size - 1]["created"], rows[size - 1]["name"]) if len(rows) > size else ""
        return [json_format.Parse(row["body"], message()) for row in rows[:size]], token

    def nodes(self, parent: str = "*") -> list[Any]:
        """Of one location, of all of a project for "-", or all."""
        return [json_format.Parse(row["body"], Node()) for row in self._rows("tpu_nodes", parent)]

    def find_queued(self, name: str) -> Any | None:
        row = self.db.connection.execute("SELECT body FROM tpu_queued WHERE name = ?", [name]).fetchone()
        return json_format.Parse(row["body"], QueuedResource()) if row else None

    def get_queued(self, name: str) -> Any:
        if (queued := self.find_queued(name)) is None:
            raise ApiError("NOT_FOUND", f"Resource '{name}' was not found")
        return queued

    def add_queued(self, queued: Any, created: float) -> None:
        values = [queued.name, queued.name.rsplit("/queuedResources/", 1)[0], created, created, _dump(queued)]
        self.db.connection.execute("INSERT INTO tpu_queued VALUES (?, ?, ?, ?, ?)", values)

    def put_queued(self, queued: Any, entered: float) -> None:
        with self.db.transaction() as connection:
            connection.execute(
                "UPDATE tpu_queued SET body = ?, entered = ? WHERE name = ?", [_dump(queued), entered, queued.name]
            )

    def entered(self, name: str) -> tuple[float, float]:
        """When a queued resource was created, and when it entered the state that it is in."""
        row = self.db.connection.execute("SELECT created, entered FROM tpu_queued WHERE name = ?", [name]).fetchone()
        return row["created"], row["entered"]

    def delete_queued(self, name: str) -> None:
        with self.db.transaction() as connection:
            connection.execute("DELETE FROM tpu_queued WHERE name = ?", [name])

    def queued(self, parent: str = "*") -> list[Any]:
        return [json_format.Parse(row["body"], QueuedResource()) for row in self._rows("tpu_queued", parent)]

    def add_operation(self, operation: Any, verb: str, target: str, request: str, created: float) -> None:
        values = [operation.name, operation.name.rsplit("/operations/", 1)[0], created, verb, target, request]
        self.db.connection.execute(
            "INSERT INTO tpu_operations VALUES (?, ?, ?, ?, ?, ?, ?, ?)", [*values, operation.done, _dump(operation)]
        )

    def put_operation(self, operation: Any) -> None:
        with self.db.transaction() as connection:
            connection.execute(
                "UPDATE tpu_operations SET done = ?, body = ? WHERE name = ?",
                [operation.done, _dump(operation), operation.name],
            )

    def operation_row(self, name: str) -> sqlite3.Row:
        row: sqlite3.Row | None = self.db.connection.execute(
            "SELECT * FROM tpu_operations WHERE name = ?", [name]
        ).fetchone()
        if row is None:
            raise ApiError("NOT_FOUND", f"Resource '{name}' was not found")
        return row

    def get_operation(self, name: str) -> Any:
        return json_format.Parse(self.operation_row(name)["body"], Operation())

    def delete_operation(self, name: str) -> None:
        with self.db.transaction() as connection:
            connection.execute("DELETE FROM tpu_operations WHERE name = ?", [name])

    def unfinished(self, target: str = "") -> list[sqlite3.Row]:
        """Operations that are not done; on one resource, or on all."""
        return self.db.connection.execute(
            "SELECT * FROM tpu_operations WHERE NOT done AND ? IN ('', target) ORDER BY created", [target]
        ).fetchall()

    def operation_of_request(self, parent: str, request: str) -> Any | None:
        """What an earlier request with the same id began."""
        row = self.db.connection.execute(
            "SELECT body FROM tpu_operations WHERE parent = ? AND request = ? AND request != ''", [parent, request]
        ).fetchone()
        return json_format.Parse(row["body"], Operation()) if row else None

    def ports(self) -> set[int]:
        return {row["port"] for row in self.db.connection.execute("SELECT port FROM tpu_nodes")}

    def add_boot(self, boot_id: str, node: str, started: float) -> None:
        with self.db.transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO tpu_boots VALUES (?, ?, ?, 0)", [boot_id, node, started])

    def end_boot(self, boot_id: str, kept: int) -> list[str]:
        """Note a boot's end; the ids of those whose output is not kept any longer."""
        with self.db.transaction() as connection:
            connection.execute("UPDATE tpu_boots SET ended = 1 WHERE id = ?", [boot_id])
            rows = connection.execute(
                "SELECT id FROM tpu_boots WHERE ended ORDER BY started DESC LIMIT -1 OFFSET ?", [kept]
            ).fetchall()
            connection.executemany("DELETE FROM tpu_boots WHERE id = ?", [[row["id"]] for row in rows])
        return [row["id"] for row in rows]

    def boots(self, node: str) -> list[str]:
        """Ids of a node's boots, in order; also after its deletion."""
        rows = self.db.connection.execute("SELECT id FROM tpu_boots WHERE node = ? ORDER BY started, rowid", [node])
        return [row["id"] for row in rows]

    def unended_boots(self) -> list[str]:
        return [row["id"] for row in self.db.connection.execute("SELECT id FROM tpu_boots WHERE NOT ended")]

    def _rows(self, table: str, parent: str) -> list[sqlite3.Row]:
        return self.db.connection.execute(
            f"SELECT body FROM {table} WHERE parent GLOB ? ORDER BY created, name", [_pattern(parent)]
        ).fetchall()


def _pattern(parent: str) -> str:
    return f"{parent[:-1]}*" if parent.endswith("/-") else parent


def _dump(message: Any) -> str:
    text: str = json_format.MessageToJson(message, indent=None)
    return text
