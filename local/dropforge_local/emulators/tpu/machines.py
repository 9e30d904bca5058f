"""The machines of nodes: a process group, a root directory and a metadata server each.

Every boot has an id. After a restart, the stack finds a machine by the id of its node's current boot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from google.cloud import tpu_v2

from ...containers import docker
from ...containers.processes import Container, ContainerSpec, Runtime
from ..kit import outputs
from ..kit.background import stop_all
from . import sandbox
from .context import Context
from .metadata import MetadataServer, Tree

log = logging.getLogger(__name__)

READY, PREEMPTED = tpu_v2.Node.State.READY, tpu_v2.Node.State.PREEMPTED


class Machines:
    """Boots machines and ends them.

    `on_crash` and `on_power_off` are called with the node of a machine that has ended by itself.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._runtime = Runtime(context.host.directory, [sandbox.SHIMS, *context.host.images.search_path])
        self._servers: dict[str, MetadataServer] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.on_crash: Callable[[str], Awaitable[None]]
        self.on_power_off: Callable[[str], Awaitable[None]]

    async def start(self) -> None:
        await self._runtime.start()

    async def stop(self) -> None:
        """Close the metadata servers; the machines continue to run. The context's background is stopped already."""
        servers, self._servers = list(self._servers.values()), {}
        await stop_all(*(server.stop for server in servers), self._runtime.stop)

    async def boot(self, name: str) -> None:
        """Run or find the machine of a READY node. Raises OSError if its metadata port is taken."""
        if name in self._watchers:
            return
        await self._serve_metadata(name)
        node = self._context.nodes.find(name)
        if node is None or node.state != READY:  # deleted or preempted while the metadata server started
            return
        boot_id = self._boot_id(name)
        self._context.boots.add(boot_id, name, self._context.clock.now())
        container = self._runtime.launch(boot_id, lambda directory: self._prepare(name, directory))
        self._watchers[name] = self._context.background.spawn(self._watch(name, container))

    async def shut_down(self, name: str, grace_seconds: float) -> None:
        """Shut the machine down (init.py), and kill it after the grace time. Does nothing if it does not run."""
        if watcher := self._watchers.pop(name, None):
            watcher.cancel()
        if self._context.nodes.row(name) is None:
            return
        boot_id = self._boot_id(name)
        if container := self._runtime.adopt(boot_id):
            if grace_seconds > 0:
                await self._stop(name, container, grace_seconds)
            await container.terminate(0)
            self._ended(container)

    async def _stop(self, name: str, container: Container, grace_seconds: float) -> None:
        """Send SIGTERM to the machine's first process, and wait for its end within the grace time."""
        try:
            pid = int((self._root(name) / "run/init.pid").read_text())
        except (FileNotFoundError, ValueError):  # the machine boots: no script runs
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(container.wait(), grace_seconds)

    async def remove(self, name: str) -> None:
        """End a machine and delete its root directory."""
        await self.shut_down(name, self._context.config.grace_seconds)
        if server := self._servers.pop(name, None):
            await server.stop()
        if self._context.nodes.row(name):
            shutil.rmtree(self._root(name), ignore_errors=True)

    def run_out_of_memory(self, name: str) -> int:
        """Kill a machine's containers as its kernel does; return their number."""
        return docker.run_out_of_memory(self._root(name))

    def notify(self, name: str) -> None:
        """Wake the requests that wait for a change of a machine's metadata."""
        if server := self._servers.get(name):
            server.notify()

    def live(self) -> list[str]:
        """Machines that have a process according to the system, and open metadata servers."""
        return [*self._runtime.live(), *(f"metadata/{name}" for name in self._servers)]

    def output(self, name: str) -> str:
        """The serial output of a node's machines, also after the node's deletion."""
        return "".join(self._runtime.output(boot_id) for boot_id in self._context.boots.of(name))

    async def _serve_metadata(self, name: str) -> None:
        if name in self._servers:
            return
        server = self._servers[name] = MetadataServer(self._row(name)["port"], lambda: self._tree(name))
        try:
            await server.start()
        except OSError:
            del self._servers[name]
            await server.stop()
            raise

    async def _watch(self, name: str, container: Container) -> None:
        await container.wait()
        self._watchers.pop(name, None)
        self._ended(container)
        log.warning("the machine of %s ended by itself", name)
        await (self.on_power_off if sandbox.is_powered_off(self._root(name)) else self.on_crash)(name)

    def _ended(self, container: Container) -> None:
        outputs.end(self._context.db, "tpu_boots", self._runtime, container, self._context.config.kept_boots)

    def _prepare(self, name: str, directory: Path) -> ContainerSpec:
        node, root, port = self._context.nodes.get(name), self._root(name), self._row(name)["port"]
        disks = [self._context.disks.content(disk.source_disk) for disk in node.data_disks]
        platform = self._context.host.environment(node.service_account.email)
        # Our servers listen on HOST. Their default is all addresses, also those that other computers reach.
        environment = {**platform, "HOST": self._context.config.address(port)}
        sandbox.prepare(root, disks, self._context.host.images, environment)
        words = [sys.executable, "-I", "-S", str(sandbox.INIT)]
        if script := node.metadata.get("startup-script"):
            path = directory / "startup-script"
            path.write_text(script)
            words.append(str(path))
        env = {
            **platform,
            # Google's libraries and tools use these instead of metadata.google.internal and of 169.254.169.254.
            "GCE_METADATA_HOST": f"127.0.0.1:{port}",
            "GCE_METADATA_IP": f"127.0.0.1:{port}",
            "DROPFORGE_ROOT": str(root),
            "DROPFORGE_SANDBOX_PYTHON": sys.executable,
            "DROPFORGE_SANDBOX_MINUTE": str(self._context.config.minute_seconds),
            "DROPFORGE_SANDBOX_FINAL": str(self._context.config.final_seconds),
        }
        return ContainerSpec(tuple(words), env, root)

    def _tree(self, name: str) -> Tree:
        """https://cloud.google.com/compute/docs/metadata/predefined-metadata-keys"""
        node, row = self._context.nodes.get(name), self._row(name)
        _, project, _, zone, _, short = name.split("/")
        number, address = str(zlib.crc32(project.encode())), self._context.config.address(row["port"])
        instance: Tree = {
            "attributes": {**node.metadata, "accelerator-type": node.accelerator_type},
            "disks": _disks(node),
            "hostname": f"{short}.{zone}.c.{project}.internal",
            "id": str(int(row["uid"][:15], 16)),
            "machine-type": f"projects/{number}/machineTypes/tpu-vm",
            "maintenance-event": row["maintenance"],
            "name": short,
            "network-interfaces": {"0": {"ip": address, "network": node.network_config.network}},
            "preempted": "TRUE" if node.state == PREEMPTED else "FALSE",
            "scheduling": {"preemptible": "TRUE" if is_spot(node) else "FALSE"},
            "service-accounts": self._service_accounts(node.service_account),
            "zone": f"projects/{number}/zones/{zone}",
        }
        return {"instance": instance, "project": {"numeric-project-id": number, "project-id": project}}

    def _service_accounts(self, account: Any) -> Tree:
        entries: Tree = {
            "aliases": "default\n",
            "email": account.email,
            "scopes": "".join(f"{scope}\n" for scope in account.scope),
            "token": lambda query: self._access_token(account.email),
            "identity": lambda query: self._context.identity(query.get("audience", ""), account.email),
        }
        return {"default": entries, account.email: entries}

    def _access_token(self, account: str) -> str:
        token = self._context.token("https://www.googleapis.com/auth/cloud-platform", account)
        return (
            f'{{"access_token": "{token}", "expires_in": {self._context.config.token_seconds}, "token_type": "Bearer"}}'
        )

    def _root(self, name: str) -> Path:
        return self._runtime.directory / ".machines" / str(self._row(name)["uid"])

    def _boot_id(self, name: str) -> str:
        row = self._row(name)
        return f"{name.rsplit('/', 1)[1][:40]}-{row['uid'][:8]}-{row['boot']}"

    def _row(self, name: str) -> Any:
        return self._context.node_row(name)


def is_spot(node: Any) -> bool:
    return bool(node.scheduling_config.spot or node.scheduling_config.preemptible)


def _disks(node: Any) -> Tree:
    boot = {"device-name": "boot", "index": "0", "mode": "READ_WRITE", "type": "PERSISTENT"}
    return {"0": boot, **{str(index): _disk(index, disk) for index, disk in enumerate(node.data_disks, start=1)}}


def _disk(index: int, disk: Any) -> Tree:
    mode = tpu_v2.AttachedDisk.DiskMode(disk.mode).name
    return {"device-name": f"persistent-disk-{index}", "index": str(index), "mode": mode, "type": "PERSISTENT"}
