"""Compute Engine's disks behind a session that calls the REST API."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from .world import World, broken

DISK = "compute.googleapis.com/Disk"
ROOT = "https://compute.chaos"


@dataclass
class Disk:
    """A zonal disk. `user` is the machine that it is attached to."""

    name: str
    labels: dict[str, str]
    created: float
    status: str = "CREATING"
    user: str = ""


class Disks:
    """The service, and the session."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.disks: dict[str, Disk] = {}
        self._operations: dict[str, dict[str, Any]] = {}
        self._requests: dict[str, str] = {}  # the operation of each request id

    def clients(self) -> dict[str, Callable[..., Any]]:
        return {"compute": lambda: (self, ROOT)}

    def living(self) -> list[str]:
        return sorted(self.disks)

    def answers(self, url: str) -> bool:
        return False

    def request(self, verb: str, url: str, params: Any = None, json: Any = None, timeout: float = 0) -> Any:
        """requests.Session.request."""
        path = url.removeprefix(f"{ROOT}/")
        query = params or {}
        return self.world.effect(
            f"compute.{verb} {path.rsplit('/', 1)[-1]}",
            lambda: _response(verb, url, *self._answer(verb, path, query, json)),
            changes=verb != "GET",
            error=broken,
        )

    def attach(self, name: str, user: str) -> str:
        """Attach a disk to a machine. Returns an error message, or "" on success."""
        disk = self.disks.get(name)
        if disk is None or disk.status != "READY" or disk.user not in ("", user):
            return f"The resource '{name}' was not found, is not ready, or is in use"
        disk.user = user
        return ""

    def detach(self, user: str) -> None:
        """Detach the disks of a deleted machine."""
        for disk in self.disks.values():
            if disk.user == user:
                disk.user = ""

    def _answer(self, verb: str, path: str, query: dict[str, str], body: Any) -> tuple[int, dict[str, Any]]:
        if path.endswith("/aggregated/disks"):
            return 200, {"items": self._items()}
        if verb == "POST":
            return self._insert(path, query.get("requestId", ""), body)
        if "/operations/" in path:
            return 200, self._operations[path.rsplit("/", 1)[1]]
        disk = self.disks.get(path)
        if disk is None:
            return 404, _refusal(f"The resource '{path}' was not found")
        return (200, _shown(disk)) if verb == "GET" else self._delete(disk)

    def _insert(self, parent: str, request: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        world, name = self.world, f"{parent}/{body['name']}"
        if request in self._requests:
            return 200, self._operations[self._requests[request]]
        if name in self.disks:
            return 409, _refusal(f"The resource '{name}' already exists")
        if world.happens(world.faults.quota * 0.5):
            return 403, _refusal("Quota 'SSD_TOTAL_GB' exceeded.  Limit: 500.0 in this region.")
        operation: dict[str, Any] = {"name": f"operation-{world.id()}"}
        self._operations[operation["name"]] = operation
        self._requests[request] = operation["name"]
        if world.happens(world.faults.stockout * 0.2):
            code = "ZONE_RESOURCE_POOL_EXHAUSTED"
            operation["error"] = {"errors": [{"code": code, "message": "The zone does not have enough resources."}]}
            return 200, operation
        disk = self.disks[name] = Disk(name, dict(body["labels"]), world.now)
        world.fact("created", type=DISK, name=name, labels=disk.labels)

        def ready() -> None:
            if disk.status == "CREATING":
                disk.status = "READY"

        world.after(world.duration(world.faults.slow_start, (10, 300), (0.2, 3)), ready)
        return 200, operation

    def _delete(self, disk: Disk) -> tuple[int, dict[str, Any]]:
        if disk.user:
            message = f"The disk resource '{disk.name}' is already being used by '{disk.user}'"
            return 400, _refusal(message)
        if disk.status != "DELETING":
            disk.status = "DELETING"
            self.world.deleting(name=disk.name)
            wait = self.world.duration(self.world.faults.slow_end, (5, 300), (0.1, 3))
            self.world.after(wait, lambda: self._gone(disk))
        return 200, {"name": "operation-delete"}

    def _gone(self, disk: Disk) -> None:
        if self.disks.get(disk.name) is disk:
            del self.disks[disk.name]
            self.world.fact("gone", name=disk.name)

    def _items(self) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for name in sorted(self.disks):
            zone = re.fullmatch(r"projects/[^/]+/(zones/[^/]+)/disks/[^/]+", name)
            assert zone is not None, "the name of a disk"
            items.setdefault(zone[1], {"disks": []})["disks"].append(_shown(self.disks[name]))
        return items


def _shown(disk: Disk) -> dict[str, Any]:
    shown = {
        "name": disk.name.rsplit("/", 1)[1],
        "status": disk.status,
        "labels": disk.labels,
        "creationTimestamp": datetime.fromtimestamp(disk.created, UTC).isoformat(timespec="milliseconds"),
    }
    return {**shown, "users": [disk.user]} if disk.user else shown


def _refusal(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def _response(verb: str, url: str, status: int, body: dict[str, Any]) -> Any:
    """requests.Response."""
    request = SimpleNamespace(method=verb, url=url)
    return SimpleNamespace(ok=status < 400, status_code=status, json=lambda: body, request=request)
