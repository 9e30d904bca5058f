"""Long-running operations: begun, carried out, finished, listed and awaited in one way, with one table for every API.

Cloud Run and Cloud TPU answer google.longrunning.Operation (`longrunning`). GKE and Compute Engine have operation
resources of their own, which their emulators render from the same record.
"""

from __future__ import annotations

import base64
import json
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import RPC_CODE, ApiError

from .background import Background, Changes
from .names import location_of, parent_pattern
from .paging import Paging, cut, read_token

SCHEMA = """
CREATE TABLE IF NOT EXISTS operations (
  api TEXT NOT NULL, name TEXT NOT NULL, parent TEXT NOT NULL, created REAL NOT NULL, verb TEXT NOT NULL,
  target TEXT NOT NULL, request TEXT NOT NULL, waits_for TEXT NOT NULL, metadata TEXT NOT NULL, ended REAL,
  response TEXT, error TEXT, PRIMARY KEY (api, name)
);
CREATE INDEX IF NOT EXISTS operations_unfinished ON operations (api, target) WHERE ended IS NULL;
"""
KEPT_SECONDS = 7 * 24 * 3600.0  # a finished operation is forgotten after this time
PAGES = Paging(default=100, largest=1000)
Json = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """The record of an operation. `name` and `target` are full resource names, times are Unix seconds.

    `metadata` belongs to the API. `response` is a packed message (`pack`), `error` the JSON of a google.rpc.Status; a
    finished operation has one of them.
    """

    name: str
    created: float
    verb: str
    target: str
    metadata: Json
    ended: float | None = None
    response: Json | None = None
    error: Json | None = None

    @property
    def is_done(self) -> bool:
        return self.ended is not None

    @property
    def parent(self) -> str:
        return self.name.rsplit("/operations/", 1)[0]


Step = Callable[[Operation], Awaitable[None]]


class Operations:
    """The operations of one API.

    A step carries out the operations of one verb and calls `finish` or `fail`; a step that raises ApiError fails its
    operation. The next start runs the step of every unfinished operation again, so steps must be repeatable.
    """

    def __init__(
        self, db: Database, clock: Clock, api: str, not_found: str = "Operation '{name}' does not exist."
    ) -> None:
        self._db = db
        self._clock = clock
        self._api = api
        self._not_found = not_found
        self._steps: Mapping[str, Step] = {}
        self._changes = Changes()
        self._background = Background(f"an operation of {api}")
        db.connection.executescript(SCHEMA)

    def carry_out(self, steps: Mapping[str, Step]) -> None:
        """Set the steps by verb. An operation whose verb has no step is finished by `finish_waiting`."""
        self._steps = steps

    def start(self) -> None:
        """Resume unfinished operations."""
        for operation in self.unfinished():
            self._spawn(operation)

    async def stop(self) -> None:
        await self._background.stop()

    def begin(
        self,
        operation_id: str,
        verb: str,
        target: str,
        *,
        metadata: Json | None = None,
        request: str = "",
        waits_for: str = "",
    ) -> Operation:
        """Record an operation in the location of `target`; its step starts after the caller's transaction.

        `request` is the id of the client's request (see `of_request`). `waits_for` names the resource whose end
        finishes the operation (see `finish_waiting`).
        """
        parent = location_of(target)
        name, now = f"{parent}/operations/{operation_id}", self._clock.now()
        operation = Operation(name, now, verb, target, metadata or {})
        with self._db.transaction() as connection:
            connection.execute(
                "INSERT INTO operations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL)",
                [self._api, name, parent, now, verb, target, request, waits_for, json.dumps(operation.metadata)],
            )
            if not waits_for:
                self._db.after_commit(lambda: self._spawn(operation))
        return operation

    def get(self, name: str) -> Operation:
        """Raises ApiError NOT_FOUND."""
        if operation := self._select("name = ?", name):
            return operation[0]
        raise ApiError("NOT_FOUND", self._not_found.format(name=name))

    def of_request(self, parent: str, request: str) -> Operation | None:
        """The operation that an earlier request with the same id began; None for a request without an id."""
        known = self._select("parent = ? AND request = ? AND request != ''", parent, request)
        return known[0] if known else None

    def unfinished(self, target: str = "") -> list[Operation]:
        """Operations that wait for no resource and have not ended; on one target, or on all."""
        return self._select("ended IS NULL AND waits_for = '' AND ? IN ('', target) ORDER BY created", target)

    def page(self, parent: str, size: int = 0, token: str = "") -> tuple[list[Operation], str]:
        """A location's operations, newest first ("-": of all locations), and the token of the next page."""
        size = PAGES.size(size)
        operations = self._select(
            "parent GLOB ? AND (created, name) < (?, ?) ORDER BY created DESC, name DESC LIMIT ?",
            parent_pattern(parent),
            *read_token(token, [1e99, ""]),
            size + 1,
        )
        page, following = cut(operations, size, lambda operation: [operation.created, operation.name])
        return list(page), following

    def delete(self, name: str) -> None:
        """Forget a finished operation. Raises ApiError FAILED_PRECONDITION for an unfinished one."""
        if not self.get(name).is_done:
            raise ApiError("FAILED_PRECONDITION", f"Operation {name!r} is still running; it can be deleted once done.")
        self._db.write("DELETE FROM operations WHERE api = ? AND name = ?", [self._api, name])

    async def wait(self, name: str, seconds: float) -> Operation:
        """The operation once it is done, or as it is after `seconds`."""
        await self._changes.until(lambda: self.get(name).is_done, seconds)
        return self.get(name)

    def finish(self, operation: Operation, response: Json, metadata: Json | None = None) -> None:
        self._end(operation, metadata, json.dumps(response), None)

    def fail(self, operation: Operation, status: str, message: str, metadata: Json | None = None) -> None:
        self._end(operation, metadata, None, json.dumps({"code": RPC_CODE[status], "message": message}))

    def wait_for(self, operation: Operation, resource: str) -> None:
        """Let the end of `resource` finish the operation."""
        self._db.write(
            "UPDATE operations SET waits_for = ? WHERE api = ? AND name = ?", [resource, self._api, operation.name]
        )

    def finish_waiting(self, resource: str, finish: Callable[[Operation], None]) -> None:
        """Call `finish` with every operation that waits for the end of `resource`."""
        for operation in self._select("ended IS NULL AND waits_for = ?", resource):
            finish(operation)

    def _spawn(self, operation: Operation) -> None:
        self._background.spawn(self._run(operation))

    async def _run(self, operation: Operation) -> None:
        try:
            await self._steps[operation.verb](operation)
        except ApiError as error:
            self.fail(operation, error.status, error.message)

    def _end(self, operation: Operation, metadata: Json | None, response: str | None, error: str | None) -> None:
        now, body = self._clock.now(), json.dumps(operation.metadata if metadata is None else metadata)
        with self._db.transaction() as connection:
            connection.execute(
                "UPDATE operations SET ended = ?, metadata = ?, response = ?, error = ? WHERE api = ? AND name = ?",
                [now, body, response, error, self._api, operation.name],
            )
            connection.execute(
                "DELETE FROM operations WHERE api = ? AND created < ? AND ended NOT NULL",
                [self._api, now - KEPT_SECONDS],
            )
            self._db.after_commit(self._changes.notify)

    def _select(self, condition: str, *values: object) -> list[Operation]:
        rows = self._db.rows(f"SELECT * FROM operations WHERE api = ? AND {condition}", [self._api, *values])
        return [_read(row) for row in rows]


def pack(message: Any) -> Json:
    """A protobuf message as JSON can hold it: its bytes, because its JSON takes ten times as long to write and read."""
    packed = any_pb2.Any()
    packed.Pack(message)
    return {"type": packed.type_url, "bytes": base64.b64encode(packed.value).decode()}


def unpack(body: Json, message: Any) -> Any:
    """Read what `pack` has packed into an empty message of the same type, and return the message."""
    _any(body).Unpack(message)
    return message


def _any(body: Json) -> any_pb2.Any:
    return any_pb2.Any(type_url=body["type"], value=base64.b64decode(body["bytes"]))


EMPTY = pack(empty_pb2.Empty())


def longrunning(operation: Operation, metadata: Json | None = None) -> Any:
    """The record as google.longrunning.Operation, with other metadata than the record's if given."""
    shown = operations_pb2.Operation(name=operation.name, done=operation.is_done)
    if metadata or operation.metadata:
        shown.metadata.CopyFrom(_any(metadata or operation.metadata))
    if operation.error:
        shown.error.code, shown.error.message = operation.error["code"], operation.error["message"]
    elif operation.response:
        shown.response.CopyFrom(_any(operation.response))
    return shown


class OperationMethods:
    """The methods of google.longrunning.Operations that answer at once, over `_operations`."""

    _operations: Operations
    shown: Callable[[Operation], Any] = staticmethod(longrunning)

    def get_operation(self, request: Any) -> Any:
        return self.shown(self._operations.get(request.name))

    def list_operations(self, request: Any) -> Any:
        operations, token = self._operations.page(request.name, request.page_size, request.page_token)
        messages = map(self.shown, operations)
        return operations_pb2.ListOperationsResponse(operations=messages, next_page_token=token)

    def delete_operation(self, request: Any) -> Any:
        self._operations.delete(request.name)
        return empty_pb2.Empty()


def _read(row: sqlite3.Row) -> Operation:
    response, error = (json.loads(row[column]) if row[column] else None for column in ("response", "error"))
    columns = (row["name"], row["created"], row["verb"], row["target"], json.loads(row["metadata"]), row["ended"])
    return Operation(*columns, response, error)
