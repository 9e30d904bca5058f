"""Nodes and their states: created, provisioned, rebooted, preempted, stopped, removed.

Each step stores the new state before it acts on the state, so that the next start continues from there. Each step is
repeatable.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from google.cloud import tpu_v2

from dropforge_local.base.errors import ApiError
from dropforge_local.base.ports import free_port

from ..kit.background import Changes
from . import rules
from .context import Context
from .machines import Machines, is_spot

log = logging.getLogger(__name__)

State = tpu_v2.Node.State
Health = tpu_v2.Node.Health
TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"


class Nodes:
    """The actions on nodes. `changes` reports every change of a state."""

    def __init__(self, context: Context, machines: Machines) -> None:
        self._context = context
        self._machines = machines
        self.changes = Changes()
        machines.on_crash = self.reboot
        machines.on_power_off = self.note_power_off

    async def start(self) -> None:
        """Find the machines of nodes again, and finish the actions that an earlier stack began."""
        spawn = self._context.background.spawn
        for node in self._context.nodes.list():
            if node.state == State.PREEMPTED:
                await self._machines.shut_down(node.name, 0)
            elif self._context.node_row(node.name)["maintenance"] != "NONE":
                spawn(self.maintain(node.name))
            elif node.state == State.RESTARTING:
                spawn(self.reboot(node.name))
            elif node.state == State.READY:
                await self._machines.boot(node.name)

    def create(self, node: Any, name: str) -> None:
        """Store a checked node, CREATING, in the caller's transaction. Raises ApiError."""
        if self._context.nodes.find(name):
            raise ApiError("ALREADY_EXISTS", f"Resource '{name}' already exists")
        self._check_quota(node, name)
        queued, now = node.queued_resource, self._context.clock.now()
        rules.complete(node, name, self._context.config)
        for disk in node.data_disks:
            self._context.disks.attach(disk.source_disk, name)
        node.state, node.queued_resource = State.CREATING, queued
        node.create_time.FromMilliseconds(int(now * 1000))
        taken = {self._context.node_row(other.name)["port"] for other in self._context.nodes.list()}
        port = free_port(self._context.config.metadata_ports, taken)
        self._context.nodes.add(name, node, now, uid=uuid.uuid4().hex, port=port, boot=0, maintenance="NONE")

    async def provision(self, name: str) -> None:
        """Bring a CREATING node up. Raises ApiError if that is impossible; the node is deleted then."""
        deleted = ApiError("CANCELLED", f"{name} was deleted while it was created")
        if (row := self._context.nodes.row(name)) is None:
            raise deleted
        await self._context.clock.sleep_until(row["created"] + self._context.config.create_seconds)
        zone = name.split("/")[3]
        if self.is_stocked_out(zone):
            self._forget(name)
            raise stockout(zone)
        with self._context.db.transaction():
            node = self._context.nodes.find(name)
            if node is None or node.state == State.DELETING:
                raise deleted
            if node.state == State.CREATING:
                self._set_ready(node)
        await self._machines.boot(name)
        self.changes.notify()
        if (after := self._context.faults.take_preemption()) is not None:
            self._context.background.spawn(self._preempt_later(name, after))

    def begin_removal(self, name: str) -> None:
        """Mark a node as DELETING, in the caller's transaction. Raises ApiError."""
        node = self._context.nodes.get(name)
        if node.state == State.DELETING:
            raise ApiError("FAILED_PRECONDITION", f"{name} is being deleted")
        self._set_state(node, State.DELETING)

    async def remove(self, name: str) -> None:
        """End a node's machine and delete the node. Does nothing without the node."""
        await self._machines.remove(name)
        await self._context.sleep(self._context.config.delete_seconds)
        self._forget(name)
        self.changes.notify()

    async def preempt(self, name: str) -> None:
        """Preempt a node: notice, grace time, end of the machine. The node stays, PREEMPTED, until its deletion."""
        node = self._context.nodes.get(name)
        if node.state not in (State.READY, State.RESTARTING, State.REPAIRING):
            return
        self._set_state(node, State.PREEMPTED)
        self._machines.notify(name)
        await self._machines.shut_down(name, self._context.config.grace_seconds)
        self.changes.notify()

    async def reboot(self, name: str, grace_seconds: float = 0.0) -> None:
        """End a node's machine, at once or after the grace time, and boot it again with the same disks."""
        node = self._context.nodes.get(name)
        self._set_state(node, State.RESTARTING)
        await self._machines.shut_down(name, grace_seconds)
        await self._context.sleep(self._context.config.reboot_seconds)
        with self._context.db.transaction():
            node = self._context.nodes.find(name)
            if node is None or node.state != State.RESTARTING:
                return
            self._set_ready(node)
        await self._machines.boot(name)
        self.changes.notify()

    async def maintain(self, name: str) -> None:
        """Carry out host maintenance: a notice in the metadata, then a reboot with a grace time."""
        self._context.nodes.set(name, maintenance=TERMINATE)
        node = self._context.nodes.get(name)
        node.health, node.health_description = Health.UNHEALTHY_MAINTENANCE, "The node is undergoing maintenance."
        self._context.nodes.put(node.name, node)
        self._machines.notify(name)
        await self._context.sleep(self._context.config.maintenance_seconds)
        await self.reboot(name, self._context.config.grace_seconds)
        self._context.nodes.set(name, maintenance="NONE")

    def begin(self, name: str, allowed: Any, state: Any) -> None:
        """Move a node from the state `allowed` to a transient state, in the caller's transaction. Raises ApiError."""
        node = self._context.nodes.get(name)
        if node.queued_resource:
            raise ApiError(
                "FAILED_PRECONDITION", f"{name} belongs to a queued resource; it cannot be stopped or started"
            )
        if node.state != allowed:
            raise ApiError("FAILED_PRECONDITION", f"{name} is {State(node.state).name}; expected {State(allowed).name}")
        self._set_state(node, state)

    async def halt(self, name: str) -> None:
        """Stop a node's machine."""
        await self._machines.shut_down(name, self._context.config.grace_seconds)
        self._set_state(self._context.nodes.get(name), State.STOPPED)

    async def note_power_off(self, name: str) -> None:
        """Record that a machine has shut itself down: the node is STOPPED, as a VM of Compute Engine."""
        node = self._context.nodes.find(name)
        if node is not None and node.state == State.READY:
            self._set_state(node, State.STOPPED)
            self.changes.notify()

    async def resume(self, name: str) -> None:
        """Start the machine of a stopped node."""
        await self._context.sleep(self._context.config.reboot_seconds)
        with self._context.db.transaction():
            self._set_ready(self._context.nodes.get(name))
        await self._machines.boot(name)

    async def run_out_of_memory(self, name: str) -> None:
        """Kill the machine's containers as its kernel does; the machine continues to run."""
        if not self._machines.run_out_of_memory(name):
            log.warning("no container runs on %s", name)

    def find(self, part: str) -> str:
        """The name of the only node whose name ends with `part`. Raises ApiError."""
        names = [str(node.name) for node in self._context.nodes.list() if part and node.name.endswith(part)]
        if len(names) != 1:
            raise ApiError("NOT_FOUND", f"{len(names)} nodes are called {part!r}; expected one")
        return names[0]

    def is_stocked_out(self, zone: str) -> bool:
        return self._context.faults.is_stocked_out(zone)

    def act(self, action: str, name: str) -> None:
        """Begin a fault that happens at once."""
        actions = {
            "preempt": self.preempt,
            "reboot": self.reboot,
            "maintenance": self.maintain,
            "out_of_memory": self.run_out_of_memory,
        }
        self._context.background.spawn(actions[action](name))

    def _check_quota(self, node: Any, name: str) -> None:
        """Raise RESOURCE_EXHAUSTED if the zone's quota does not allow the node."""
        parent, zone, config = name.rsplit("/nodes/", 1)[0], name.split("/")[3], self._context.config
        wanted, tier = rules.slice_of(node, zone, config), _tier(node)
        used = wanted.chips
        for other in self._context.nodes.list(parent):
            existing = rules.slice_of_existing(other, zone, config)
            if existing.generation is wanted.generation and _tier(other) == tier:
                used += existing.chips
        limit = self._context.faults.quota(zone, config.chips_per_zone)
        if used > limit:
            quota = f"{wanted.generation.quota.format(tier=tier)}PerProjectPerZoneForTPUAPI"
            message = f"Quota limit '{quota}' has been exceeded. Limit: {limit} in zone {zone}."
            raise ApiError("RESOURCE_EXHAUSTED", message)

    async def _preempt_later(self, name: str, after_seconds: float) -> None:
        await self._context.sleep(after_seconds)
        if self._context.nodes.find(name):
            await self.preempt(name)

    def _set_ready(self, node: Any) -> None:
        """READY for a new boot, with the address by which other machines reach the node."""
        node.state, node.health, node.health_description = State.READY, Health.HEALTHY, ""
        row = self._context.node_row(node.name)
        del node.network_endpoints[:]
        node.network_endpoints.add(ip_address=self._context.config.address(row["port"]), port=8470)
        self._context.nodes.put(node.name, node, boot=row["boot"] + 1)

    def _set_state(self, node: Any, state: Any) -> None:
        node.state = state
        self._context.nodes.put(node.name, node)
        self._context.db.after_commit(self.changes.notify)

    def _forget(self, name: str) -> None:
        with self._context.db.transaction():
            self._context.disks.detach(name)
            self._context.nodes.delete(name)


def stockout(zone: str) -> ApiError:
    """Cloud TPU's error when a zone has no capacity."""
    return ApiError(
        "RESOURCE_EXHAUSTED",
        f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are '
        "offered (see https://cloud.google.com/tpu/docs/regions)",
    )


def _tier(node: Any) -> str:
    return "Preemptible" if is_spot(node) else ""
