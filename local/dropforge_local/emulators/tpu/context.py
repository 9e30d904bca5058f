"""The state, the settings and the platform that the parts of the TPU emulator share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from google.cloud import tpu_v2

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from ...containers.images import ImageStore
from ..compute.disks import Disks
from ..kit.background import Background
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
    """`platform_env` maps a service account to the variables by which its machines find Google's APIs.

    `token` makes the access token of a scope. `disks` are Compute Engine's.
    """

    db: Database
    clock: Clock
    config: TpuConfig
    nodes: Messages
    queued: Messages
    boots: Boots
    faults: Faults
    disks: Disks
    images: ImageStore
    platform_env: Callable[[str], Mapping[str, str]]
    token: Callable[[str], str]
    background: Background

    def node_row(self, name: str) -> Any:
        """All columns of an existing node. Raises LookupError for a deleted node."""
        if (row := self.nodes.row(name)) is None:
            raise LookupError(f"there is no node {name!r}")
        return row

    async def sleep(self, seconds: float) -> None:
        await self.clock.sleep_until(self.clock.now() + seconds)


def make_context(db: Database, clock: Clock, config: TpuConfig, methods: Collection[str], **platform: Any) -> Context:
    """The state in `db`, with `disks`, `images`, `platform_env` and `token` of the platform."""
    return Context(
        db=db,
        clock=clock,
        config=config,
        nodes=Messages(db, "tpu_nodes", Node, columns=NODE_COLUMNS),
        queued=Messages(db, "tpu_queued", QueuedResource, columns=QUEUED_COLUMNS),
        boots=Boots(db),
        faults=Faults(db, methods),
        background=Background("Cloud TPU"),
        **platform,
    )
