"""Nodes through their states: created, provisioned, rebooted, preempted, stopped, removed.

A state is stored before what it stands for is done, so that the next stack goes on from there; each step may be done
again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from google.cloud import tpu_v2
from google.rpc import status_pb2

from dropforge_local.base.clock import Clock
from dropforge_local.base.errors import RPC_CODE, ApiError
from dropforge_local.base.ports import free_port

from ..compute.disks import Disks
from . import rules
from .config import TpuConfig
from .faults import Faults
from .machines import Machines
from .store import Store

log = logging.getLogger(__name__)

State = tpu_v2.Node.State
Health = tpu_v2.Node.Health
TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"


class Nodes:
    """What can happen to nodes. `changed` is set at every change of a state."""

    def __init__(
        self, store: Store, clock: Clock, machines: Machines, disks: Disks, faults: Faults, config: TpuConfig
    ) -> None:
        self._store = store
        self._clock = clock
        self._machines = machines
        self._disks = disks
        self._faults = faults
        self._config = config
        self._tasks: set[asyncio.Task[None]] = set()
        self.changed = asyncio.Event()
        machines.crashed = self.reboot
        machines.powered_off = self.note_power_off

    async def start(self) -> None:
        """Find the machines of nodes again, and go on with what an earlier stack was about to do to them."""
        for node in self._store.nodes():
            if node.state == State.PREEMPTED:
                await self._machines.shut_down(node.name, 0)
            elif self._store.node_row(node.name)["maintenance"] != "NONE":  # type: ignore[index]
                self._spawn(self.maintain(node.name))
            elif node.state == State.RESTARTING:
                self._spawn(self.reboot(node.name))
            elif node.state == State.READY:
                await self._machines.boot(node.name)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def create(self, node: Any, name: str) -> None:
        """Store a node that was checked, CREATING; in the caller's transaction. Raises ApiError."""
        if self._store.find_node(name):
            raise ApiError("ALREADY_EXISTS", f"Resource '{name}' already exists")
        if obstacle := self.quota_obstacle(node, name):
            raise ApiError("RESOURCE_EXHAUSTED", obstacle)
        queued = node.queued_resource
        rules.complete(node, name, self._config)
        for disk in node.data_disks:
            self._disks.attach(disk.source_disk, name)
        node.state, node.queued_resource = State.CREATING, queued
        node.create_time.FromMilliseconds(int(self._clock.now() * 1000))
        port = free_port(self._config.metadata_ports, self._store.ports())
        self._store.add_node(node, self._clock.now(), port)

    async def provision(self, name: str) -> status_pb2.Status | None:
        """Bring a node that is CREATING up; the reason if it cannot be had, and then the node is gone."""
        if (row := self._store.node_row(name)) is None:
            return _status("CANCELLED", f"{name} was deleted while it was created")
        await self._clock.sleep_until(row["created"] + self._config.create_seconds)
        zone = name.split("/")[3]
        if self._faults.is_stocked_out(zone):
            self._forget(name)
            return _status("RESOURCE_EXHAUSTED", stockout(zone))
        with self._store.db.transaction():
            node = self._store.find_node(name)
            if node is None or node.state == State.DELETING:
                return _status("CANCELLED", f"{name} was deleted while it was created")
            if node.state == State.CREATING:
                self._set_ready(node)
        await self._machines.boot(name)
        self._notify()
        if (after := self._faults.take_preemption()) is not None:
            self._spawn(self._preempt_later(name, after))
        return None

    def begin_removal(self, name: str) -> None:
        """Mark a node as DELETING; in the caller's transaction. Raises ApiError."""
        node = self._store.get_node(name)
        if node.state == State.DELETING:
            raise ApiError("FAILED_PRECONDITION", f"{name} is being deleted")
        self._set_state(node, State.DELETING)

    async def remove(self, name: str) -> None:
        """End a node's machine and forget the node; nothing happens when there is none."""
        await self._machines.remove(name)
        await self._clock.sleep_until(self._clock.now() + self._config.delete_seconds)
        self._forget(name)
        self._notify()

    async def preempt(self, name: str) -> None:
        """Take a node's machine away: notice, grace time, end. The node stays, PREEMPTED, until it is deleted."""
        node = self._store.get_node(name)
        if node.state not in (State.READY, State.RESTARTING, State.REPAIRING):
            return
        self._set_state(node, State.PREEMPTED)
        self._machines.notify(name)
        await self._machines.shut_down(name, self._config.grace_seconds)
        self._notify()

    async def reboot(self, name: str, grace_seconds: float = 0.0) -> None:
        """End a node's machine, at once or after the grace time, and boot it again with the same disks."""
        node = self._store.get_node(name)
        self._set_state(node, State.RESTARTING)
        await self._machines.shut_down(name, grace_seconds)
        await self._clock.sleep_until(self._clock.now() + self._config.reboot_seconds)
        with self._store.db.transaction():
            node = self._store.find_node(name)
            if node is None or node.state != State.RESTARTING:
                return
            self._set_ready(node)
        await self._machines.boot(name)
        self._notify()

    async def maintain(self, name: str) -> None:
        """Host maintenance: a notice in the metadata, then a reboot in order."""
        self._store.set_node(name, maintenance=TERMINATE)
        node = self._store.get_node(name)
        node.health, node.health_description = Health.UNHEALTHY_MAINTENANCE, "The node is undergoing maintenance."
        self._store.put_node(node)
        self._machines.notify(name)
        await self._clock.sleep_until(self._clock.now() + self._config.maintenance_seconds)
        await self.reboot(name, self._config.grace_seconds)
        self._store.set_node(name, maintenance="NONE")

    def begin(self, name: str, allowed: Any, state: Any) -> None:
        """Move a node from one state to a passing one; in the caller's transaction. Raises ApiError."""
        node = self._store.get_node(name)
        if node.queued_resource:
            raise ApiError(
                "FAILED_PRECONDITION", f"{name} belongs to a queued resource; it cannot be stopped or started"
            )
        if node.state != allowed:
            raise ApiError("FAILED_PRECONDITION", f"{name} is {State(node.state).name}; expected {State(allowed).name}")
        self._set_state(node, state)

    async def halt(self, name: str) -> None:
        """What stopping a node stands for."""
        await self._machines.shut_down(name, self._config.grace_seconds)
        self._set_state(self._store.get_node(name), State.STOPPED)

    async def note_power_off(self, name: str) -> None:
        """A machine has shut itself down: it stays so, as a VM of Compute Engine does."""
        node = self._store.find_node(name)
        if node is not None and node.state == State.READY:
            self._set_state(node, State.STOPPED)
            self._notify()

    async def resume(self, name: str) -> None:
        """What starting a stopped node stands for."""
        await self._clock.sleep_until(self._clock.now() + self._config.reboot_seconds)
        with self._store.db.transaction():
            self._set_ready(self._store.get_node(name))
        await self._machines.boot(name)

    async def run_out_of_memory(self, name: str) -> None:
        """The kernel kills the container; the machine goes on."""
        if not self._machines.run_out_of_memory(name):
            log.warning("no container runs on %s", name)

    def find(self, part: str) -> str:
        """The one node whose name ends with `part`. Raises ApiError."""
        found = [node.name for node in self._store.nodes() if part and node.name.endswith(part)]
        if len(found) != 1:
            raise ApiError("NOT_FOUND", f"{len(found)} nodes are called {part!r}; expected one")
        return str(found[0])

    def quota_obstacle(self, node: Any, name: str) -> str:
        """Why the quota does not allow a node; empty when it does."""
        parent, zone = name.rsplit("/nodes/", 1)[0], name.split("/")[3]
        wanted, tier = rules.slice_of(node, zone, self._config), _tier(node)
        used = wanted.chips
        for other in self._store.nodes(parent):
            found = rules.slice_of_existing(other, zone, self._config)
            if found.generation is wanted.generation and _tier(other) == tier:
                used += found.chips
        limit = self._faults.quota(zone, self._config.chips_per_zone)
        if used <= limit:
            return ""
        quota = f"{wanted.generation.quota.format(tier=tier)}PerProjectPerZoneForTPUAPI"
        return f"Quota limit '{quota}' has been exceeded. Limit: {limit} in zone {zone}."

    def is_stocked_out(self, zone: str) -> bool:
        return self._faults.is_stocked_out(zone)

    def spawn(self, action: str, name: str) -> None:
        """Begin one of the faults that act at once."""
        actions = {
            "preempt": self.preempt,
            "reboot": self.reboot,
            "maintenance": self.maintain,
            "out_of_memory": self.run_out_of_memory,
        }
        self._spawn(actions[action](name))

    async def _preempt_later(self, name: str, after_seconds: float) -> None:
        await self._clock.sleep_until(self._clock.now() + after_seconds)
        if self._store.find_node(name):
            await self.preempt(name)

    def _set_ready(self, node: Any) -> None:
        """A machine that is to boot: a boot of its own, and the address that others reach it by."""
        node.state, node.health, node.health_description = State.READY, Health.HEALTHY, ""
        row = self._store.node_row(node.name)
        del node.network_endpoints[:]
        node.network_endpoints.add(ip_address=self._config.address(row["port"]), port=8470)  # type: ignore[index]
        self._store.put_node(node)
        self._store.set_node(node.name, boot=row["boot"] + 1, ready=self._clock.now())  # type: ignore[index]

    def _set_state(self, node: Any, state: Any) -> None:
        node.state = state
        self._store.put_node(node)
        self._store.db.after_commit(self._notify)

    def _forget(self, name: str) -> None:
        with self._store.db.transaction():
            self._disks.detach(name)
            self._store.delete_node(name)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("what was to happen to a node failed; it is tried again at the next start", exc_info=error)


def stockout(zone: str) -> str:
    """What Cloud TPU says when it has none left."""
    return (
        f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are '
        "offered (see https://cloud.google.com/tpu/docs/regions)"
    )


def _tier(node: Any) -> str:
    return "Preemptible" if node.scheduling_config.spot or node.scheduling_config.preemptible else ""


def _status(code: str, message: str) -> status_pb2.Status:
    return status_pb2.Status(code=RPC_CODE[code], message=message)
