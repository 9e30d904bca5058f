"""The Compute Engine API v1 over REST: disks and zonal operations, for google-cloud-compute, gcloud and plain HTTP."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError
from dropforge_local.iam import require

from ..kit.access import guarded
from ..kit.emulator import PassiveEmulator
from ..kit.faults import Switches
from ..kit.names import Named
from ..kit.operations import EMPTY, Operation, Operations
from ..kit.routing import Call, Route, mount
from .config import ComputeConfig
from .disks import Disks
from .permissions import NEEDS, SET_LABELS
from .rules import check_zone, in_use, make_disk
from .wire import operation_json

WAIT_SECONDS = 120.0  # https://cloud.google.com/compute/docs/reference/rest/v1/zoneOperations/wait
MAX_RESULTS = 500  # https://cloud.google.com/compute/docs/reference/rest/v1/disks/aggregatedList
LABEL_FILTER = re.compile(r"""labels\.([-_a-z0-9]+) *(?:=|:| eq ) *["']?([-_a-z0-9]+)["']?""")


class ComputeEmulator(PassiveEmulator, Named):
    """Disks over REST. The machines of other emulators attach `disks`. Satisfies server.Emulator."""

    tables = ("compute_disks",)

    def __init__(
        self,
        db: Database,
        clock: Clock,
        *,
        directory: Path,
        config: ComputeConfig = ComputeConfig(),  # noqa: B008 - frozen
    ) -> None:
        self.disks = Disks(db, directory)
        self._db = db
        self._clock = clock
        self._config = config
        self._operations = Operations(db, clock, "Compute Engine", "The resource '{name}' was not found")
        self._operations.carry_out({"insert": self._finish_insert, "delete": self._finish_delete})
        methods: dict[str, tuple[str, str, Callable[[Call], Any]]] = {
            "insert_disk": ("POST", "{parent=projects/*/zones/*}/disks", self._insert),
            "list_disks": ("GET", "{parent=projects/*/zones/*}/disks", self._list),
            "get_disk": ("GET", "{name=projects/*/zones/*/disks/*}", self._get),
            "delete_disk": ("DELETE", "{name=projects/*/zones/*/disks/*}", self._delete),
            "aggregated_list_disks": ("GET", "{parent=projects/*}/aggregated/disks", self._aggregate),
            "get_operation": ("GET", "{name=projects/*/zones/*/operations/*}", self._get_operation),
            "wait_operation": ("POST", "{name=projects/*/zones/*/operations/*}/wait", self._wait),
        }
        self._faults = Switches(db, "compute_settings", {"quota": {}}, methods=list(methods))
        self._routes = [
            Route(verb, f"/compute/v1/{path}", guarded(self._faults.wrap(method, handler), NEEDS[method]))
            for method, (verb, path, handler) in methods.items()
        ]

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return mount([*self._routes, self._faults.route("compute")])

    async def start(self) -> None:
        self._operations.start()

    async def stop(self) -> None:
        await self._operations.stop()

    def live(self) -> list[str]:
        """The names of all disks."""
        return self.names_in(self._db)

    def _insert(self, call: Call) -> dict[str, Any]:
        parent = call.names["parent"]
        check_zone(parent)
        if known := self._operations.of_request(parent, call.text("requestId")):
            return operation_json(known)
        disk_id = random.getrandbits(62)
        disk = make_disk(call.json(), parent, disk_id, self._clock.now())
        if disk.get("labels"):
            require(SET_LABELS, parent)
        name = f"{parent}/disks/{disk['name']}"
        with self._db.transaction():
            if self.disks.find(name):
                raise ApiError("ALREADY_EXISTS", f"The resource '{name}' already exists")
            self._check_quota(parent, int(disk["sizeGb"]))
            self.disks.add(name, disk_id, disk)
            return self._begin("insert", name, call)

    def _list(self, call: Call) -> dict[str, Any]:
        if call.text("filter"):
            raise ApiError("UNIMPLEMENTED", "filters on disks are not emulated by the local stack")
        parent = call.names["parent"]
        return {"kind": "compute#diskList", "id": f"{parent}/disks", "items": self.disks.list(parent)}

    def _aggregate(self, call: Call) -> dict[str, Any]:
        """A page of the project's disks by zone; every page but the last may end in the middle of a zone."""
        project = call.names["parent"]
        size = _max_results(call.text("maxResults"))
        disks = self.disks.page(project, _labels_of(call.text("filter")), call.text("pageToken"), size + 1)
        items: dict[str, Any] = {}
        for name, disk in disks[:size]:
            items.setdefault(f"zones/{name.split('/')[3]}", {"disks": []})["disks"].append(disk)
        page = {"kind": "compute#diskAggregatedList", "id": f"{project}/aggregated/disks", "items": items}
        return {**page, "nextPageToken": disks[size - 1][0]} if len(disks) > size else page

    def _get(self, call: Call) -> dict[str, Any]:
        return self.disks.get(call.names["name"])

    def _delete(self, call: Call) -> dict[str, Any]:
        name = call.names["name"]
        if known := self._operations.of_request(name.rsplit("/disks/", 1)[0], call.text("requestId")):
            return operation_json(known)
        with self._db.transaction():
            disk = self.disks.get(name)
            if users := disk.get("users"):
                raise in_use(name, users[0])
            self.disks.set_status(name, "DELETING")
            return self._begin("delete", name, call)

    def _get_operation(self, call: Call) -> dict[str, Any]:
        return operation_json(self._operations.get(call.names["name"]))

    async def _wait(self, call: Call) -> dict[str, Any]:
        """The operation once it is done, or as it is after two minutes."""
        return operation_json(await self._operations.wait(call.names["name"], WAIT_SECONDS))

    def _begin(self, verb: str, target: str, call: Call) -> dict[str, Any]:
        operation_id, metadata = f"operation-{uuid.uuid4().hex}", {"targetId": self.disks.get(target)["id"]}
        request = call.text("requestId")
        return operation_json(self._operations.begin(operation_id, verb, target, metadata=metadata, request=request))

    async def _finish_insert(self, operation: Operation) -> None:
        await self._clock.sleep_until(operation.created + self._config.create_seconds)
        with self._db.transaction():
            self.disks.set_status(operation.target, "READY")
            self._operations.finish(operation, EMPTY)

    async def _finish_delete(self, operation: Operation) -> None:
        await self._clock.sleep_until(operation.created + self._config.delete_seconds)
        with self._db.transaction():
            self.disks.delete(operation.target)
            self._operations.finish(operation, EMPTY)

    def _check_quota(self, parent: str, wanted: int) -> None:
        zone = parent.rsplit("/", 1)[1]
        limit = self._faults.get("quota").get(zone, self._config.disk_gb_per_zone)
        if self.disks.used_gb(parent) + wanted > limit:
            region = zone.rsplit("-", 1)[0]
            raise ApiError(
                "PERMISSION_DENIED", f"Quota 'DISKS_TOTAL_GB' exceeded.  Limit: {limit:.1f} in region {region}."
            )


def _max_results(text: str) -> int:
    """The size of a page; 0 stands for the default, which is the largest."""
    if text and not (text.isdecimal() and int(text) <= MAX_RESULTS):
        message = f"Invalid value for field 'maxResults': '{text}'. Acceptable values are 0 to {MAX_RESULTS}"
        raise ApiError("INVALID_ARGUMENT", message)
    return int(text or 0) or MAX_RESULTS


def _labels_of(text: str) -> dict[str, str]:
    """The labels that a list's filter asks for."""
    if not text:
        return {}
    if (label := LABEL_FILTER.fullmatch(text.strip())) is None:
        raise ApiError("UNIMPLEMENTED", f"the local stack filters disks by labels.KEY=VALUE only, not by {text!r}")
    return {label[1]: label[2]}
