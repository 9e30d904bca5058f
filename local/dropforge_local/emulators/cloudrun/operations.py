"""Long-running operations: google.longrunning.Operation over Cloud Run's REST paths (get, list, delete, wait)."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from typing import Any

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import RPC_CODE, ApiError

from .messages import pack
from .store import new_uid

KEPT_SECONDS = 7 * 24 * 3600.0  # finished operations are forgotten after this


class Operations:
    """Operations in the database; whoever carries one out calls `finish` or `fail`, after a restart too."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self.db = db
        self.clock = clock
        self._changed = asyncio.Event()

    def begin(self, verb: str, target: Any, *, metadata: Any = None, waits_for: str | None = None) -> sqlite3.Row:
        """Record an operation on the resource `target`; `waits_for` names an execution whose end finishes it."""
        # The prefix tells these from other APIs' operations: TPU's have the same paths.
        location = "/".join(target.name.split("/")[:4])
        name = f"{location}/operations/run-{new_uid()}"
        with self.db.transaction() as connection:
            connection.execute(
                "INSERT INTO cloudrun_operations VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL)",
                [
                    name,
                    location,
                    self.clock.now(),
                    verb,
                    target.name,
                    target.generation,
                    waits_for,
                    json.dumps(pack(metadata if metadata is not None else target)),
                ],
            )
            return self.row(name)

    def row(self, name: str) -> sqlite3.Row:
        row = self.db.connection.execute("SELECT * FROM cloudrun_operations WHERE name = ?", [name]).fetchone()
        if row is None:
            raise ApiError("NOT_FOUND", f"Operation {name!r} does not exist.")
        found: sqlite3.Row = row
        return found

    def get(self, name: str) -> dict[str, Any]:
        return render_operation(self.row(name))

    def unfinished(self) -> list[sqlite3.Row]:
        return self.db.connection.execute(
            "SELECT * FROM cloudrun_operations WHERE response IS NULL AND error IS NULL ORDER BY created"
        ).fetchall()

    def page(self, parent: str) -> dict[str, Any]:
        rows = self.db.connection.execute(
            "SELECT * FROM cloudrun_operations WHERE parent = ? ORDER BY created DESC LIMIT 100", [parent]
        )
        return {"operations": [render_operation(row) for row in rows]}

    def delete(self, name: str) -> dict[str, Any]:
        if not is_done(self.row(name)):
            raise ApiError("FAILED_PRECONDITION", f"Operation {name!r} is still running; it can be deleted once done.")
        with self.db.transaction() as connection:
            connection.execute("DELETE FROM cloudrun_operations WHERE name = ?", [name])
        return {}

    async def wait(self, name: str, timeout_seconds: float) -> dict[str, Any]:
        """Return once done, or as it is when the time is up."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while not is_done(self.row(name)):
            left = deadline - asyncio.get_running_loop().time()
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), max(left, 0))
            except TimeoutError:
                break
        return self.get(name)

    def finish(self, name: str, resource: Any) -> None:
        """Done; a Cloud Run operation's metadata is the resource too."""
        self._end(name, "response", pack(resource), pack(resource))

    def fail(self, name: str, status: str, message: str, resource: Any) -> None:
        self._end(name, "error", {"code": RPC_CODE[status], "message": message}, pack(resource))

    def finish_waiting(self, execution: str, resource_of: Callable[[sqlite3.Row], Any]) -> None:
        """Finish whatever waits for the end of an execution."""
        rows = self.db.connection.execute(
            "SELECT * FROM cloudrun_operations WHERE waits_for = ? AND response IS NULL AND error IS NULL", [execution]
        ).fetchall()
        for row in rows:
            self.finish(row["name"], resource_of(row))

    def wait_for(self, name: str, execution: str) -> None:
        with self.db.transaction() as connection:
            connection.execute("UPDATE cloudrun_operations SET waits_for = ? WHERE name = ?", [execution, name])

    def _end(self, name: str, column: str, value: dict[str, Any], metadata: dict[str, Any]) -> None:
        with self.db.transaction() as connection:
            connection.execute(
                f"UPDATE cloudrun_operations SET {column} = ?, metadata = ? WHERE name = ?",
                [json.dumps(value), json.dumps(metadata), name],
            )
            connection.execute(
                "DELETE FROM cloudrun_operations WHERE created < ? AND (response NOT NULL OR error NOT NULL)",
                [self.clock.now() - KEPT_SECONDS],
            )
            self.db.after_commit(self._wake)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def is_done(row: sqlite3.Row) -> bool:
    return row["response"] is not None or row["error"] is not None


def render_operation(row: sqlite3.Row) -> dict[str, Any]:
    operation = {"name": row["name"], "metadata": json.loads(row["metadata"])}
    if is_done(row):
        operation["done"] = True
        kind = "error" if row["error"] else "response"
        operation[kind] = json.loads(row[kind])
    return operation


def immediate(resource: Any) -> dict[str, Any]:
    """The answer to a validateOnly request: an operation that is done and was never recorded."""
    location = "/".join(resource.name.split("/")[:4])
    packed = pack(resource)
    return {"name": f"{location}/operations/run-validated", "metadata": packed, "done": True, "response": packed}
