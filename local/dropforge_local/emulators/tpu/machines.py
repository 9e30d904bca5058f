"""The machines of nodes: one process group each, its root directory, and its metadata server.

A boot has an id of its own; a machine is found again after a restart of the stack by the boot that its node is at.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from google.cloud import tpu_v2

from dropforge_local.base.clock import Clock

from ...containers import docker
from ...containers.images import ImageStore
from ...containers.processes import Container, ContainerSpec, Runtime
from ..compute.disks import Disks
from . import sandbox
from .config import TpuConfig
from .metadata import MetadataServer, Tree
from .store import Store

log = logging.getLogger(__name__)

TOKEN_SECONDS = 3599
READY, PREEMPTED = tpu_v2.Node.State.READY, tpu_v2.Node.State.PREEMPTED


class Machines:
    """Boots machines and ends them. `crashed` and `powered_off` are called with the node of one that did so."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        images: ImageStore,
        directory: Path,
        disks: Disks,
        platform_env: Callable[[str], Mapping[str, str]],
        token: Callable[[str], str],
        config: TpuConfig,
    ) -> None:
        self._store = store
        self._clock = clock
        self._images = images
        self._disks = disks
        self._platform_env = platform_env
        self._token = token
        self._config = config
        self._runtime = Runtime(directory, [sandbox.SHIMS, *images.search_path])
        self._servers: dict[str, MetadataServer] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.crashed: Callable[[str], Awaitable[None]]
        self.powered_off: Callable[[str], Awaitable[None]]

    async def start(self) -> None:
        await self._runtime.start()

    async def stop(self) -> None:
        """Stop watching; the machines go on."""
        watchers = list(self._watchers.values())
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self._servers.values()))
        self._servers.clear()
        await self._runtime.stop()

    async def boot(self, name: str) -> None:
        """Run the machine of a node that is READY, or find it running. Raises OSError: its metadata port is taken."""
        if name in self._watchers:
            return
        if name not in self._servers:
            server = self._servers[name] = MetadataServer(self._row(name)["port"], lambda: self._tree(name))
            await server.start()
        node = self._store.find_node(name)
        if node is None or node.state != READY:  # it was deleted, or taken away, meanwhile
            return
        boot_id = self._boot_id(name)
        self._store.add_boot(boot_id, name, self._clock.now())
        container = self._runtime.launch(boot_id, lambda directory: self._prepare(name, directory))
        self._watchers[name] = asyncio.get_running_loop().create_task(self._watch(name, container))

    async def shut_down(self, name: str, grace_seconds: float) -> None:
        """SIGTERM, and SIGKILL after the grace time; nothing happens when the machine does not run."""
        if watcher := self._watchers.pop(name, None):
            watcher.cancel()
        if self._store.node_row(name) is None:
            return
        boot_id = self._boot_id(name)
        if container := self._runtime.adopt(boot_id):
            await container.terminate(grace_seconds)
            self._ended(container)

    async def remove(self, name: str) -> None:
        """End a machine and forget its root directory."""
        await self.shut_down(name, self._config.grace_seconds)
        if server := self._servers.pop(name, None):
            await server.stop()
        if self._store.node_row(name):
            shutil.rmtree(self._root(name), ignore_errors=True)

    def run_out_of_memory(self, name: str) -> int:
        """Kill a machine's containers as its kernel does; how many there were."""
        return docker.run_out_of_memory(self._root(name))

    def notify(self, name: str) -> None:
        """Tell those who wait for a change of a machine's metadata."""
        if server := self._servers.get(name):
            server.notify()

    def live(self) -> list[str]:
        """Machines that have a process, by what the system says, and the open metadata servers."""
        return [*self._runtime.live(), *(f"metadata/{name}" for name in self._servers)]

    def output(self, name: str) -> str:
        """What a node's machines wrote to their serial ports, also after the node's deletion."""
        return "".join(self._runtime.output(boot_id) for boot_id in self._store.boots(name))

    async def _watch(self, name: str, container: Container) -> None:
        await container.wait()
        self._watchers.pop(name, None)
        self._ended(container)
        log.warning("the machine of %s ended by itself", name)
        await (self.powered_off if sandbox.is_powered_off(self._root(name)) else self.crashed)(name)

    def _ended(self, container: Container) -> None:
        container.release()
        for old in self._store.end_boot(container.id, self._config.kept_boots):
            self._runtime.forget(old)

    def _prepare(self, name: str, directory: Path) -> ContainerSpec:
        node, root = self._store.get_node(name), self._root(name)
        disks = [self._disks.content(disk.source_disk) for disk in node.data_disks]
        # HOST is what our servers listen on; they would take all addresses, a laptop's outer ones too.
        platform = self._platform_env(node.service_account.email)
        environment = {**platform, "HOST": self._config.address(self._row(name)["port"])}
        sandbox.prepare(root, disks, self._images, environment)
        words = [sys.executable, "-I", "-S", str(sandbox.INIT)]
        if script := node.metadata.get("startup-script"):
            path = directory / "startup-script"
            path.write_text(script)
            words.append(str(path))
        metadata = f"127.0.0.1:{self._row(name)['port']}"
        env = {
            **platform,
            # What Google's libraries and tools ask instead of metadata.google.internal and of 169.254.169.254.
            "GCE_METADATA_HOST": metadata,
            "GCE_METADATA_IP": metadata,
            "DROPFORGE_ROOT": str(root),
            "DROPFORGE_SANDBOX_PYTHON": sys.executable,
            "DROPFORGE_SANDBOX_MINUTE": str(self._config.minute_seconds),
        }
        return ContainerSpec(tuple(words), env, root)

    def _tree(self, name: str) -> Tree:
        """https://cloud.google.com/compute/docs/metadata/predefined-metadata-keys"""
        node, row = self._store.get_node(name), self._row(name)
        _, project, _, zone, _, short = name.split("/")
        number, account = str(zlib.crc32(project.encode())), node.service_account
        own: Tree = {
            "aliases": "default\n",
            "email": account.email,
            "scopes": "".join(f"{scope}\n" for scope in account.scope),
            "token": lambda query: self._access_token(),
        }
        disks = {str(index): _disk(index, disk) for index, disk in enumerate(node.data_disks, start=1)}
        instance: Tree = {
            "attributes": dict(node.metadata),
            "disks": {"0": {"device-name": "boot", "index": "0", "mode": "READ_WRITE", "type": "PERSISTENT"}, **disks},
            "hostname": f"{short}.{zone}.c.{project}.internal",
            "id": str(int(row["uid"][:15], 16)),
            "machine-type": f"projects/{number}/machineTypes/tpu-vm",
            "maintenance-event": row["maintenance"],
            "name": short,
            "network-interfaces": {
                "0": {"ip": self._config.address(row["port"]), "network": node.network_config.network}
            },
            "preempted": "TRUE" if node.state == PREEMPTED else "FALSE",
            "scheduling": {"preemptible": "TRUE" if _is_spot(node) else "FALSE"},
            "service-accounts": {"default": own, account.email: own},
            "zone": f"projects/{number}/zones/{zone}",
        }
        return {"instance": instance, "project": {"numeric-project-id": number, "project-id": project}}

    def _access_token(self) -> str:
        token = self._token("https://www.googleapis.com/auth/cloud-platform")
        return f'{{"access_token": "{token}", "expires_in": {TOKEN_SECONDS}, "token_type": "Bearer"}}'

    def _root(self, name: str) -> Path:
        return self._runtime.directory / ".machines" / str(self._row(name)["uid"])

    def _boot_id(self, name: str) -> str:
        row = self._row(name)
        return f"{name.rsplit('/', 1)[1][:40]}-{row['uid'][:8]}-{row['boot']}"

    def _row(self, name: str) -> Any:
        row = self._store.node_row(name)
        if row is None:
            raise LookupError(f"there is no node {name!r}")
        return row


def _disk(index: int, disk: Any) -> Tree:
    mode = tpu_v2.AttachedDisk.DiskMode(disk.mode).name
    return {"device-name": f"persistent-disk-{index}", "index": str(index), "mode": mode, "type": "PERSISTENT"}


def _is_spot(node: Any) -> bool:
    return bool(node.scheduling_config.spot or node.scheduling_config.preemptible)
