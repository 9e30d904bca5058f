"""GPUs in use: a task that finds none free (quota, stock-out) waits, as its execution does on Cloud Run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from .faults import Faults
from .store import place_of


@dataclass(frozen=True)
class GpuKind:
    """What a quota counts: a type of GPU in a project's region, with or without zonal redundancy."""

    project: str
    region: str
    accelerator: str
    redundant: bool


def gpu_kind(name: str, template: Any) -> GpuKind | None:
    """The GPU that a task or revision template of resource `name` asks for."""
    accelerator = template.node_selector.accelerator
    if not accelerator:
        return None
    project, region = place_of(name)
    return GpuKind(project, region, accelerator, not template.gpu_zonal_redundancy_disabled)


class Capacity:
    """Who holds which GPU now. Not persisted: whoever finds its container again claims anew."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._held: dict[str, GpuKind] = {}
        self._changed = asyncio.Event()

    def obstacle(self, kind: GpuKind) -> str:
        """Why a GPU cannot be had now; empty if it can."""
        if self._faults.is_stocked_out(kind.region):
            return f"Insufficient capacity: waiting for {kind.accelerator} in {kind.region}."
        used = sum(1 for held in self._held.values() if held == kind)
        if used >= (quota := self._faults.gpu_quota(kind.region, kind.accelerator)):
            return f"Waiting for {kind.accelerator} quota in {kind.region}: {used} of {quota} in use."
        return ""

    def claim(self, holder: str, kind: GpuKind | None) -> None:
        if kind is not None:
            self._held[holder] = kind

    def release(self, holder: str) -> None:
        if self._held.pop(holder, None):
            self.notify()

    def notify(self) -> None:
        """Wake those who wait: a GPU became free or a switch was set."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        await self._changed.wait()
