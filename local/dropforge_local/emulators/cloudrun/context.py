"""The state, the settings and the background work that the parts of the emulator share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dropforge_local.base.clock import Clock

from ..kit.background import Background
from ..kit.names import location_of
from ..kit.operations import Operation, Operations, longrunning
from .capacity import Capacity
from .config import CloudRunConfig
from .faults import Faults
from .messages import packed
from .store import Store, new_uid
from .workloads import Workloads


@dataclass(frozen=True)
class Context:
    store: Store
    operations: Operations
    faults: Faults
    capacity: Capacity
    workloads: Workloads
    clock: Clock
    config: CloudRunConfig
    background: Background

    def now(self) -> float:
        return self.clock.now()

    async def sleep(self, seconds: float) -> None:
        await self.clock.sleep_until(self.clock.now() + seconds)

    async def settle(self) -> None:
        """Wait the time that every operation takes at least."""
        await self.sleep(self.config.operation_seconds)

    def log_uri(self, name: str) -> str:
        return f"{self.store.setting('origin', '')}/_local/logs/{name}"

    def begin(self, verb: str, resource: Any, *, waits_for: str = "") -> Any:
        """Begin an operation on a resource; return the message. Its metadata is the resource."""
        operation_id = f"run-{new_uid()}"  # methods.py explains the prefix
        metadata = packed(resource)
        return longrunning(
            self.operations.begin(operation_id, verb, resource.name, metadata=metadata, waits_for=waits_for)
        )

    def finish(self, operation: Operation, resource: Any) -> None:
        """Finish an operation; its response and its metadata are the resource."""
        body = packed(resource)
        self.operations.finish(operation, body, body)

    def fail(self, operation: Operation, status: str, message: str, resource: Any) -> None:
        self.operations.fail(operation, status, message, packed(resource))


def validated(resource: Any) -> Any:
    """The answer to a validateOnly request: a done operation without a record."""
    location, body = location_of(resource.name), packed(resource)
    name = f"{location}/operations/run-validated"
    return longrunning(Operation(name, 0.0, "", resource.name, body, ended=0.0, response=body))
