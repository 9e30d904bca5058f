"""GPUs in use: a task waits until a GPU is free (quota, stock-out), as its execution does on Cloud Run."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from .faults import Faults
from .store import place_of


@dataclass(frozen=True)
class GpuKind:
    """The unit of a quota: a type of GPU in a project's region, with or without zonal redundancy."""

    project: str
    region: str
    accelerator: str
    redundant: bool


def gpu_kind(name: str, template: Any) -> GpuKind | None:
    """The GPU that a task or revision template of resource `name` requests; None without a GPU."""
    accelerator = template.node_selector.accelerator
    if not accelerator:
        return None
    project, region = place_of(name)
    return GpuKind(project, region, accelerator, not template.gpu_zonal_redundancy_disabled)


class Capacity:
    """The holders of GPUs and the waiters, in memory: after a restart, every adopted container claims its GPU again."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._held: dict[str, GpuKind] = {}
        self._waiting: dict[GpuKind, list[asyncio.Event]] = defaultdict(list)

    def obstacle(self, kind: GpuKind) -> str:
        """The reason why no GPU is free now; empty if a GPU is free."""
        if self._faults.is_stocked_out(kind.region):
            return f"Insufficient capacity: waiting for {kind.accelerator} in {kind.region}."
        used = list(self._held.values()).count(kind)
        if used >= (quota := self._faults.gpu_quota(kind.region, kind.accelerator)):
            return f"Waiting for {kind.accelerator} quota in {kind.region}: {used} of {quota} in use."
        return ""

    def claim(self, holder: str, kind: GpuKind | None) -> None:
        if kind is not None:
            self._held[holder] = kind

    def release(self, holder: str) -> None:
        if kind := self._held.pop(holder, None):
            self.pass_on(kind)

    def pass_on(self, kind: GpuKind) -> None:
        """Wake only the oldest waiter if a GPU is free: the other waiters would wake unnecessarily."""
        waiting = self._waiting[kind]
        if waiting and not self.obstacle(kind):
            waiting.pop(0).set()

    def notify(self) -> None:
        """Wake every waiter, because a fault switch has changed."""
        for waiting in self._waiting.values():
            while waiting:
                waiting.pop(0).set()

    async def changed(self, kind: GpuKind) -> None:
        """Return when a GPU may be free. A caller that does not claim it must call `pass_on`."""
        turn, waiting = asyncio.Event(), self._waiting[kind]
        waiting.append(turn)
        try:
            await turn.wait()
        finally:
            if turn in waiting:
                waiting.remove(turn)
