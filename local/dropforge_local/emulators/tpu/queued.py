"""Queued resources: one driver each, from ACCEPTED to ACTIVE and then to SUSPENDED or FAILED.

States: https://cloud.google.com/tpu/docs/queued-resources. A driver stores each state before it acts on the state, so
that the driver of the next start continues from there.
"""

from __future__ import annotations

import asyncio
from typing import Any

from google.cloud import tpu_v2

from dropforge_local.base.errors import RPC_CODE, ApiError

from ..kit.background import Changes, first
from .context import Context
from .nodes import Nodes
from .nodes import State as NodeState

State = tpu_v2.QueuedResourceState.State
Initiator = tpu_v2.QueuedResourceState.StateInitiator
ENDED = (State.FAILED, State.SUSPENDED, State.DELETING)
REMOVABLE = (State.ACCEPTED, State.FAILED, State.SUSPENDED)


class QueuedResources:
    """The queued resources' states and their drivers."""

    def __init__(self, context: Context, nodes: Nodes) -> None:
        self._context = context
        self._nodes = nodes
        self._drivers: dict[str, asyncio.Task[None]] = {}
        self.switches = Changes()  # of the fault switches

    def start(self) -> None:
        """Start the drivers of queued resources that an earlier stack left unfinished."""
        for queued in self._context.queued.list():
            if queued.state.state not in (*ENDED, State.CREATING):
                self._start_driver(queued.name)

    def create(self, queued: Any, name: str) -> None:
        """Store a checked queued resource, in the caller's transaction. Raises ApiError."""
        if self._context.queued.find(name):
            raise ApiError("ALREADY_EXISTS", f"Resource '{name}' already exists")
        node_name = _node_name(queued)
        if self._context.nodes.find(node_name):
            raise ApiError("ALREADY_EXISTS", f"Resource '{node_name}' already exists")
        queued.name = name
        now = self._context.clock.now()
        queued.create_time.FromMilliseconds(int(now * 1000))
        queued.state.state, queued.state.state_initiator = State.CREATING, Initiator.USER
        self._context.queued.add(name, queued, now, entered=now)

    async def accept(self, name: str) -> None:
        """Finish a creation: ACCEPTED, and the driver starts."""
        await self._wait_in_state(name)
        queued = self._context.queued.get(name)
        if queued.state.state == State.CREATING:
            self._enter(queued, State.ACCEPTED)
        self._start_driver(name)

    def begin_removal(self, name: str, *, force: bool) -> None:
        """Mark as DELETING, in the caller's transaction. Raises ApiError if a node prevents the removal."""
        queued = self._context.queued.get(name)
        state = queued.state.state
        if state == State.DELETING:
            raise ApiError("FAILED_PRECONDITION", f"{name} is being deleted")
        if not force and state not in REMOVABLE and self._context.nodes.find(_node_name(queued)):
            raise ApiError(
                "FAILED_PRECONDITION", f"{name} is {State(state).name} and has nodes; delete them first, or set force"
            )
        self._enter(queued, State.DELETING)

    async def remove(self, name: str) -> None:
        """Delete the node of a queued resource, then the queued resource."""
        if driver := self._drivers.pop(name, None):
            driver.cancel()
            await asyncio.wait([driver])
        queued = self._context.queued.find(name)
        if queued is None:
            return
        node = self._context.nodes.find(_node_name(queued))
        if node is not None and node.queued_resource == name:
            node.state = NodeState.DELETING
            self._context.nodes.put(node.name, node)
            await self._nodes.remove(node.name)
        self._context.queued.delete(name)

    def _start_driver(self, name: str) -> None:
        if name not in self._drivers:
            task = self._drivers[name] = self._context.background.spawn(self._drive(name))
            task.add_done_callback(lambda task: self._drivers.pop(name) if self._drivers.get(name) is task else None)

    async def _drive(self, name: str) -> None:
        while (queued := self._context.queued.get(name)).state.state not in ENDED:
            state = queued.state.state
            await self._wait_in_state(name)
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
        """Wait for capacity, at the latest until the request's valid-until time."""
        until = self._valid_until(queued)
        expiry = [] if until is None else [until]
        while self._nodes.is_stocked_out(queued.name.split("/")[3]):
            await first(self.switches.wait(), *map(self._context.clock.sleep_until, expiry))
            if until is not None and self._context.clock.now() >= until:
                message = f"{queued.name} expired: no resources became available before its valid-until time"
                self._fail(queued, ApiError("DEADLINE_EXCEEDED", message))
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
            with self._context.db.transaction():
                self._nodes.create(node, _node_name(queued))
                self._enter(queued, State.PROVISIONING)
        except ApiError as error:
            self._fail(queued, error)

    async def _provision(self, queued: Any) -> None:
        try:
            await self._nodes.provision(_node_name(queued))
        except ApiError as error:
            self._fail(queued, error)
        else:
            self._enter(queued, State.ACTIVE)

    async def _watch(self, queued: Any) -> None:
        """Wait until the node is preempted or deleted."""
        name = _node_name(queued)
        lost = (NodeState.PREEMPTED, NodeState.TERMINATED, NodeState.DELETING)
        while (node := self._context.nodes.find(name)) is not None and node.state not in lost:
            await self._nodes.changes.wait()
        queued.state.state_initiator = Initiator.USER if node is None else Initiator.SERVICE
        self._enter(queued, State.SUSPENDING)

    async def _wait_in_state(self, name: str) -> None:
        """Wait the time that every state takes at least."""
        row = self._context.queued.row(name)
        if row is not None:
            await self._context.clock.sleep_until(row["entered"] + self._context.config.queue_seconds)

    def _valid_until(self, queued: Any) -> float | None:
        policy = queued.queueing_policy
        match policy.WhichOneof("start_timing_constraints"):
            case "valid_until_duration":
                created = queued.create_time.ToMilliseconds() / 1000
                return float(created + policy.valid_until_duration.ToMilliseconds() / 1000)
            case "valid_until_time":
                return float(policy.valid_until_time.ToMilliseconds() / 1000)
        return None

    def _fail(self, queued: Any, error: ApiError) -> None:
        queued.state.state_initiator = Initiator.SERVICE
        queued.state.failed_data.error.code = RPC_CODE[error.status]
        queued.state.failed_data.error.message = error.message
        self._enter(queued, State.FAILED)

    def _enter(self, queued: Any, state: Any) -> None:
        queued.state.state = state
        if state != State.FAILED:
            data = f"{State(state).name.lower()}_data"
            if data in queued.state.DESCRIPTOR.fields_by_name:  # WAITING_FOR_RESOURCES has none
                getattr(queued.state, data).SetInParent()
        self._context.queued.put(queued.name, queued, entered=self._context.clock.now())


def _node_name(queued: Any) -> str:
    spec = queued.tpu.node_spec[0]
    return f"{spec.parent}/nodes/{spec.node_id}"
