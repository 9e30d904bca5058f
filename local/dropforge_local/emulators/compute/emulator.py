"""The Compute Engine API v1 over REST: disks and zonal operations, for google-cloud-compute, gcloud and plain HTTP.

An Operation of this API is its own message, and its errors have codes in words.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ..faults import Switches, parse_faults
from .config import ComputeConfig
from .disks import LINK, Disks, check_zone, in_use, make_disk, timestamp

log = logging.getLogger(__name__)

PARENT = "projects/{project:[^/]+}/zones/{zone:[^/]+}"
OPERATION = PARENT + "/operations/{operation:[^/]+}"
WAIT_SECONDS = 120.0  # https://cloud.google.com/compute/docs/reference/rest/v1/zoneOperations/wait
METHODS = {
    "insert_disk", "get_disk", "list_disks", "aggregated_list_disks", "delete_disk", "get_operation", "wait_operation",
}  # fmt: skip
MAX_RESULTS = 500  # https://cloud.google.com/compute/docs/reference/rest/v1/disks/aggregatedList
LABEL_FILTER = re.compile(r"""labels\.([-_a-z0-9]+) *(?:=|:| eq ) *["']?([-_a-z0-9]+)["']?""")


class ComputeEmulator:
    """Disks over REST. `disks` is what the machines of other emulators attach. Satisfies server.Emulator."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        *,
        directory: Path,
        config: ComputeConfig = ComputeConfig(),  # noqa: B008 - frozen
    ) -> None:
        self.disks = Disks(db, directory)
        self._faults = Switches(db, "compute_settings", {"quota": {}})
        self._db = db
        self._clock = clock
        self._config = config
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        root = f"/compute/v1/{PARENT}"
        return [
            web.post(f"{root}/disks", self._handle("insert_disk", self._insert)),
            web.get(f"{root}/disks", self._handle("list_disks", self._list)),
            web.get(f"{root}/disks/{{disk:[^/]+}}", self._handle("get_disk", self._get)),
            web.delete(f"{root}/disks/{{disk:[^/]+}}", self._handle("delete_disk", self._delete)),
            web.get("/compute/v1/projects/{project:[^/]+}/aggregated/disks", self._handle_aggregated),
            web.get(f"/compute/v1/{OPERATION}", self._handle("get_operation", self._get_operation)),
            web.post(f"/compute/v1/{OPERATION}/wait", self._wait),
            web.post("/_local/compute/faults", self._set_faults),
        ]

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return ()

    async def start(self) -> None:
        for row in self._db.connection.execute("SELECT name FROM compute_operations WHERE NOT done").fetchall():
            self._spawn(row["name"])

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def live(self) -> list[str]:
        """Disks that exist."""
        return self.names_in(self._db)

    @staticmethod
    def names_in(db: Database) -> list[str]:
        """Disks in a state file; none when it has never had one."""
        if not db.connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'compute_disks'").fetchone():
            return []
        return [row["name"] for row in db.connection.execute("SELECT name FROM compute_disks ORDER BY name")]

    def _insert(self, parent: str, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        check_zone(parent)
        if known := self._of_request(parent, request):
            return known
        disk_id = random.getrandbits(62)
        disk = make_disk(body, parent, disk_id, self._clock.now())
        name = f"{parent}/disks/{disk['name']}"
        with self._db.transaction():
            if self.disks.find(name):
                raise ApiError("ALREADY_EXISTS", f"The resource '{name}' already exists")
            self._check_quota(parent, int(disk["sizeGb"]))
            self.disks.add(name, disk_id, disk)
            return self._begin("insert", parent, name, request)

    def _list(self, parent: str, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        if request.query.get("filter"):
            raise ApiError("UNIMPLEMENTED", "filters on disks are not emulated by the local stack")
        return {"kind": "compute#diskList", "id": f"{parent}/disks", "items": self.disks.list(parent)}

    def _aggregated(self, request: web.Request) -> dict[str, Any]:
        """A page of the project's disks by zone; one that is not the last may end in the middle of a zone."""
        project, query = request.match_info["project"], request.query
        size = _max_results(query.get("maxResults", ""))
        found = self.disks.page(project, _labels_of(query.get("filter", "")), query.get("pageToken", ""), size + 1)
        items: dict[str, Any] = {}
        for name, disk in found[:size]:
            items.setdefault(f"zones/{name.split('/')[3]}", {"disks": []})["disks"].append(disk)
        following = {"nextPageToken": found[size - 1][0]} if len(found) > size else {}
        return {
            "kind": "compute#diskAggregatedList",
            "id": f"projects/{project}/aggregated/disks",
            "items": items,
            **following,
        }

    def _get(self, parent: str, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        return self.disks.get(f"{parent}/disks/{request.match_info['disk']}")

    def _delete(self, parent: str, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        name = f"{parent}/disks/{request.match_info['disk']}"
        if known := self._of_request(parent, request):
            return known
        with self._db.transaction():
            disk = self.disks.get(name)
            if users := disk.get("users"):
                raise in_use(name, users[0])
            self.disks.set_status(name, "DELETING")
            return self._begin("delete", parent, name, request)

    def _get_operation(self, parent: str, request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
        return self._operation(f"{parent}/operations/{request.match_info['operation']}")

    async def _wait(self, request: web.Request) -> web.Response:
        """Answer once the operation is done, or as it is after two minutes."""
        name = "projects/{project}/zones/{zone}/operations/{operation}".format(**request.match_info)
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while (operation := self._operation(name))["status"] != "DONE":
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
        return web.json_response(operation)

    def _begin(self, verb: str, parent: str, target: str, request: web.Request) -> dict[str, Any]:
        now = self._clock.now()
        short = f"operation-{uuid.uuid4().hex}"
        name = f"{parent}/operations/{short}"
        operation = {
            "kind": "compute#operation",
            "id": str(random.getrandbits(62)),
            "name": short,
            "zone": f"{LINK}/{parent}",
            "operationType": verb,
            "targetLink": f"{LINK}/{target}",
            "targetId": self.disks.get(target)["id"],
            "status": "RUNNING",
            "progress": 0,
            "insertTime": timestamp(now),
            "startTime": timestamp(now),
            "selfLink": f"{LINK}/{name}",
        }
        self._db.connection.execute(
            "INSERT INTO compute_operations VALUES (?, ?, ?, ?, ?, 0, ?)",
            [name, parent, request.query.get("requestId", ""), target, now, json.dumps(operation)],
        )
        self._db.after_commit(lambda: self._spawn(name))
        return operation

    async def _carry_out(self, name: str) -> None:
        """What an operation stands for; every step may be done again after a restart."""
        row = self._row(name)
        operation: dict[str, Any] = json.loads(row["body"])
        inserting = operation["operationType"] == "insert"
        delay = self._config.create_seconds if inserting else self._config.delete_seconds
        await self._clock.sleep_until(row["created"] + delay)
        done = {"status": "DONE", "progress": 100, "endTime": timestamp(self._clock.now())}
        with self._db.transaction() as connection:
            if inserting:
                self.disks.set_status(row["target"], "READY")
            else:
                self.disks.delete(row["target"])
            connection.execute(
                "UPDATE compute_operations SET done = 1, body = ? WHERE name = ?",
                [json.dumps({**operation, **done}), name],
            )
        self._changed.set()
        self._changed.clear()

    def _operation(self, name: str) -> dict[str, Any]:
        operation: dict[str, Any] = json.loads(self._row(name)["body"])
        return operation

    def _row(self, name: str) -> Any:
        row = self._db.connection.execute("SELECT * FROM compute_operations WHERE name = ?", [name]).fetchone()
        if row is None:
            raise ApiError("NOT_FOUND", f"The resource '{name}' was not found")
        return row

    def _of_request(self, parent: str, request: web.Request) -> dict[str, Any] | None:
        """The operation that an earlier request of the same id began."""
        request_id = request.query.get("requestId", "")
        row = self._db.connection.execute(
            "SELECT body FROM compute_operations WHERE parent = ? AND request = ? AND request != ''",
            [parent, request_id],
        ).fetchone()
        return json.loads(row["body"]) if row else None

    def _check_quota(self, parent: str, wanted: int) -> None:
        zone = parent.rsplit("/", 1)[1]
        limit = self._faults.get("quota").get(zone, self._config.disk_gb_per_zone)
        if self.disks.used_gb(parent) + wanted > limit:
            region = zone.rsplit("-", 1)[0]
            raise ApiError(
                "PERMISSION_DENIED", f"Quota 'DISKS_TOTAL_GB' exceeded.  Limit: {limit:.1f} in region {region}."
            )

    def _handle(
        self, method: str, handler: Callable[[str, web.Request, dict[str, Any]], dict[str, Any]]
    ) -> Callable[[web.Request], Any]:
        async def serve(request: web.Request) -> web.Response:
            parent = "projects/{project}/zones/{zone}".format(**request.match_info)
            body = _parse(await request.read()) if request.method == "POST" else {}
            return web.json_response(await self._faults.call(method, lambda: handler(parent, request, body)))

        return serve

    async def _handle_aggregated(self, request: web.Request) -> web.Response:
        return web.json_response(await self._faults.call("aggregated_list_disks", lambda: self._aggregated(request)))

    async def _set_faults(self, request: web.Request) -> web.Response:
        return web.json_response(self._faults.configure(parse_faults(await request.read()), METHODS))

    def _spawn(self, operation: str) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(operation))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("an operation of Compute Engine failed; it is tried again at the next start", exc_info=error)


def _max_results(text: str) -> int:
    """0 stands for the default, which is the largest."""
    if text and not (text.isdecimal() and int(text) <= MAX_RESULTS):
        message = f"Invalid value for field 'maxResults': '{text}'. Acceptable values are 0 to {MAX_RESULTS}"
        raise ApiError("INVALID_ARGUMENT", message)
    return int(text or 0) or MAX_RESULTS


def _labels_of(text: str) -> dict[str, str]:
    if not text:
        return {}
    if (found := LABEL_FILTER.fullmatch(text.strip())) is None:
        raise ApiError("UNIMPLEMENTED", f"the local stack filters disks by labels.KEY=VALUE only, not by {text!r}")
    return {found[1]: found[2]}


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data or b"{}")
    except ValueError as error:
        raise ApiError("INVALID_ARGUMENT", f"the request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError("INVALID_ARGUMENT", f"the request body is a JSON {type(body).__name__}; expected an object")
    return body
