"""Queued resources: one driver each, from ACCEPTED to ACTIVE and on to SUSPENDED or FAILED.

States: https://cloud.google.com/tpu/docs/queued-resources. A state is stored with what it stands for, so that the next
stack's driver goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from google.cloud import tpu_v2
from google.rpc import status_pb2

from dropforge_local.base.clock import Clock
from dropforge_local.base.errors import RPC_CODE, ApiError

from .config import TpuConfig
from .nodes import Nodes
from .nodes import State as NodeState
from .store import Store

log = logging.getLogger(__name__)

State = tpu_v2.QueuedResourceState.State
Initiator = tpu_v2.QueuedResourceState.StateInitiator
ENDED = (State.FAILED, State.SUSPENDED, State.DELETING)


class QueuedResources:
    """The queued resources' states and their drivers."""

    def __init__(self, store: Store, clock: Clock, nodes: Nodes, config: TpuConfig) -> None:
        self._store = store
        self._clock = clock
        self._nodes = nodes
        self._config = config
        self._drivers: dict[str, asyncio.Task[None]] = {}
        self.changed = asyncio.Event()  # a fault switch

    def start(self) -> None:
        for queued in self._store.queued():
            if queued.state.state not in (*ENDED, State.CREATING):
                self.drive(queued.name)

    async def stop(self) -> None:
        drivers = list(self._drivers.values())
        for driver in drivers:
            driver.cancel()
        await asyncio.gather(*drivers, return_exceptions=True)

    def create(self, queued: Any, name: str) -> None:
        """Store a queued resource that was checked; in the caller's transaction. Raises ApiError."""
        if self._store.find_queued(name):
            raise ApiError("ALREADY_EXISTS", f"Resource '{name}' already exists")
        node_name = _node_name(queued)
        if self._store.find_node(node_name):
            raise ApiError("ALREADY_EXISTS", f"Resource '{node_name}' already exists")
        queued.name = name
        now = self._clock.now()
        queued.create_time.FromMilliseconds(int(now * 1000))
        queued.state.state, queued.state.state_initiator = State.CREATING, Initiator.USER
        self._store.add_queued(queued, now)

    async def accept(self, name: str) -> Any:
        """The end of a creation: ACCEPTED, from where its driver takes it on."""
        await self._clock.sleep_until(self._store.entered(name)[0] + self._config.queue_seconds)
        queued = self._store.get_queued(name)
        if queued.state.state == State.CREATING:
            self._enter(queued, State.ACCEPTED)
        self.drive(name)
        return self._store.get_queued(name)

    def begin_removal(self, name: str, *, force: bool) -> None:
        """Mark as DELETING; in the caller's transaction. Raises ApiError when nodes are in the way."""
        queued = self._store.get_queued(name)
        if queued.state.state == State.DELETING:
            raise ApiError("FAILED_PRECONDITION", f"{name} is being deleted")
        removable = queued.state.state in (State.ACCEPTED, State.FAILED, State.SUSPENDED)
        if not force and not removable and self._store.find_node(_node_name(queued)):
            state = State(queued.state.state).name
            raise ApiError("FAILED_PRECONDITION", f"{name} is {state} and has nodes; delete them first, or set force")
        self._enter(queued, State.DELETING)

    async def remove(self, name: str) -> None:
        """Delete the nodes of a queued resource, and then itself."""
        if driver := self._drivers.pop(name, None):
            driver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await driver
        queued = self._store.find_queued(name)
        if queued is None:
            return
        node = self._store.find_node(_node_name(queued))
        if node is not None and node.queued_resource == name:
            node.state = NodeState.DELETING
            self._store.put_node(node)
            await self._nodes.remove(node.name)
        self._store.delete_queued(name)

    def drive(self, name: str) -> None:
        if name not in self._drivers:
            task = self._drivers[name] = asyncio.get_running_loop().create_task(self._drive(name))
            task.add_done_callback(lambda task: self._done(name, task))

    def notify(self) -> None:
        """A fault switch has changed."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def _drive(self, name: str) -> None:
        while (queued := self._store.get_queued(name)).state.state not in ENDED:
            state = queued.state.state
            await self._settle(name)
            if state == State.ACCEPTED:
                self._enter(queued, State.WAITING_FOR_RESOURCES)
            elif state == State.WAITING_FOR_RESOURCES:
                await self._wait_for_resources(queued)
            elif state == State.PROVISIONING:
                await self._provision(queued)
            elif state == State.ACTIVE:
                await self._watch(queued)
            elif state == State.SUSPENDING:
                self._enter(queued, State.SUSPENDED)

    async def _wait_for_resources(self, queued: Any) -> None:
        """Until there is capacity, or the time is up that the request is good for."""
        until = self._valid_until(queued)
        zone = queued.name.split("/")[3]
        while self._nodes.is_stocked_out(zone):
            changed = self.changed.wait()
            if until is None:
                await changed
                continue
            sleep = asyncio.ensure_future(self._clock.sleep_until(until))
            waiting = asyncio.ensure_future(changed)
            try:
                await asyncio.wait({sleep, waiting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sleep.cancel()
                waiting.cancel()
            if self._clock.now() >= until:
                message = f"{queued.name} expired: no resources became available before its valid-until time"
                self._fail(queued, status_pb2.Status(code=RPC_CODE["DEADLINE_EXCEEDED"], message=message))
                return
        self._begin_provisioning(queued)

    def _begin_provisioning(self, queued: Any) -> None:
        spec = queued.tpu.node_spec[0]
        node = type(spec.node)()
        node.CopyFrom(spec.node)
        node.queued_resource = queued.name
        if queued.WhichOneof("tier") == "spot":
            node.scheduling_config.spot = True
        if queued.reservation_name:
            node.scheduling_config.reserved = True
        try:
            with self._store.db.transaction():
                self._nodes.create(node, _node_name(queued))
                self._enter(queued, State.PROVISIONING)
        except ApiError as error:
            self._fail(queued, status_pb2.Status(code=RPC_CODE[error.status], message=error.message))

    async def _provision(self, queued: Any) -> None:
        if (reason := await self._nodes.provision(_node_name(queued))) is not None:
            self._fail(queued, reason)
        else:
            self._enter(queued, State.ACTIVE)

    async def _watch(self, queued: Any) -> None:
        """Until the node is taken away or deleted."""
        name = _node_name(queued)
        while True:
            changed = self._nodes.changed
            node = self._store.find_node(name)
            if node is None or node.state in (NodeState.PREEMPTED, NodeState.TERMINATED, NodeState.DELETING):
                break
            await changed.wait()
        queued.state.state_initiator = Initiator.USER if node is None else Initiator.SERVICE
        self._enter(queued, State.SUSPENDING)

    async def _settle(self, name: str) -> None:
        """Let pass the time that a state takes at least."""
        await self._clock.sleep_until(self._store.entered(name)[1] + self._config.queue_seconds)

    def _valid_until(self, queued: Any) -> float | None:
        policy = queued.queueing_policy
        match policy.WhichOneof("start_timing_constraints"):
            case "valid_until_duration":
                duration = policy.valid_until_duration.ToMilliseconds() / 1000
                return self._store.entered(queued.name)[0] + float(duration)
            case "valid_until_time":
                return float(policy.valid_until_time.ToMilliseconds() / 1000)
        return None

    def _fail(self, queued: Any, error: status_pb2.Status) -> None:
        queued.state.state_initiator = Initiator.SERVICE
        queued.state.failed_data.error.CopyFrom(error)
        self._enter(queued, State.FAILED)

    def _enter(self, queued: Any, state: Any) -> None:
        queued.state.state = state
        if state != State.FAILED:
            data = f"{State(state).name.lower()}_data"
            if data in queued.state.DESCRIPTOR.fields_by_name:  # WAITING_FOR_RESOURCES has none
                getattr(queued.state, data).SetInParent()
        self._store.put_queued(queued, self._clock.now())

    def _done(self, name: str, task: asyncio.Task[None]) -> None:
        if self._drivers.get(name) is task:
            del self._drivers[name]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%s stopped; it goes on at the next start", name, exc_info=error)


def _node_name(queued: Any) -> str:
    spec = queued.tpu.node_spec[0]
    return f"{spec.parent}/nodes/{spec.node_id}"
