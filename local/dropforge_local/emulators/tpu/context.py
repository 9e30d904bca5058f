"""The state, the settings and the platform that the parts of the TPU emulator share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from google.cloud import tpu_v2

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from ..compute.disks import Disks
from ..kit.background import Background
from ..kit.host import Host
from ..kit.messages import Messages
from .boots import Boots
from .config import TpuConfig
from .faults import Faults

Node = tpu_v2.Node.pb()
QueuedResource = tpu_v2.QueuedResource.pb()
# The metadata server's port, the number of the current boot, and the metadata server's maintenance event.
NODE_COLUMNS = "uid TEXT NOT NULL, port INTEGER NOT NULL, boot INTEGER NOT NULL, maintenance TEXT NOT NULL"
QUEUED_COLUMNS = "entered REAL NOT NULL"  # when the queued resource entered its present state


@dataclass(frozen=True)
class Context:
    """`disks` are Compute Engine's. `token` makes the access token of a scope and an account; `identity` the identity
    token of an audience and an account, and "" where machines have none.
    """

    host: Host
    config: TpuConfig
    nodes: Messages
    queued: Messages
    boots: Boots
    faults: Faults
    disks: Disks
    token: Callable[[str, str], str]
    identity: Callable[[str, str], str]
    background: Background

    @property
    def db(self) -> Database:
        return self.host.db

    @property
    def clock(self) -> Clock:
        return self.host.clock

    def node_row(self, name: str) -> Any:
        """All columns of an existing node. Raises LookupError for a deleted node."""
        if (row := self.nodes.row(name)) is None:
            raise LookupError(f"there is no node {name!r}")
        return row

    async def sleep(self, seconds: float) -> None:
        await self.clock.sleep_until(self.clock.now() + seconds)


def make_context(
    host: Host,
    config: TpuConfig,
    methods: Collection[str],
    disks: Disks,
    token: Callable[[str, str], str],
    identity: Callable[[str, str], str],
) -> Context:
    """The state in the host's database."""
    nodes = Messages(host.db, "tpu_nodes", Node, columns=NODE_COLUMNS)
    queued = Messages(host.db, "tpu_queued", QueuedResource, columns=QUEUED_COLUMNS)
    faults, background = Faults(host.db, methods), Background("Cloud TPU")
    return Context(host, config, nodes, queued, Boots(host.db), faults, disks, token, identity, background)
