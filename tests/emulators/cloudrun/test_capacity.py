"""Which waiter gets a GPU that becomes free: the oldest waiter wakes, and passes the GPU on if it does not take it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dropforge_local.base.db import Database
from dropforge_local.emulators.cloudrun import CloudRunConfig
from dropforge_local.emulators.cloudrun.capacity import Capacity, GpuKind
from dropforge_local.emulators.cloudrun.faults import Faults

L4, T4 = (GpuKind("p1", "us-central1", accelerator, False) for accelerator in ("nvidia-l4", "nvidia-tesla-t4"))


def with_a_crowd(work: Callable[[Capacity, list[asyncio.Task[None]], Faults], Awaitable[None]]) -> None:
    """Run `work` with a taken GPU of each kind, three waiters for an L4 and one for a T4."""

    async def run() -> None:
        faults = Faults(Database(":memory:"), CloudRunConfig(gpu_quota=1))
        capacity = Capacity(faults)
        for kind in (L4, T4):
            capacity.claim(f"holder of {kind.accelerator}", kind)
        crowd = [asyncio.create_task(capacity.changed(kind)) for kind in (L4, L4, L4, T4)]
        await settled()
        await work(capacity, crowd, faults)
        for waiter in crowd:
            waiter.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)

    asyncio.run(run())


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def woken(crowd: list[asyncio.Task[None]]) -> list[bool]:
    return [waiter.done() for waiter in crowd]


def test_a_free_gpu_wakes_only_the_oldest_waiter() -> None:
    async def work(capacity: Capacity, crowd: list[asyncio.Task[None]], faults: Faults) -> None:
        capacity.release("holder of nvidia-l4")
        await settled()
        assert woken(crowd) == [True, False, False, False]
        capacity.claim("the first", L4)
        capacity.release("the first")
        await settled()
        assert woken(crowd) == [True, True, False, False]

    with_a_crowd(work)


def test_a_waiter_passes_the_gpu_on_and_a_cancelled_waiter_is_not_woken() -> None:
    async def work(capacity: Capacity, crowd: list[asyncio.Task[None]], faults: Faults) -> None:
        crowd[1].cancel()
        await settled()
        capacity.pass_on(L4)
        await settled()
        assert woken(crowd) == [False, True, False, False], "no GPU was free"
        capacity.release("holder of nvidia-l4")
        capacity.pass_on(L4)
        await settled()
        assert woken(crowd) == [True, True, True, False]

    with_a_crowd(work)


def test_a_switch_wakes_every_waiter() -> None:
    async def work(capacity: Capacity, crowd: list[asyncio.Task[None]], faults: Faults) -> None:
        faults.configure({"stockout": ["us-central1"]})
        capacity.release("holder of nvidia-l4")
        await settled()
        assert woken(crowd) == [False] * 4, "the region is stocked out"
        faults.configure({"stockout": []})
        capacity.notify()
        await settled()
        assert woken(crowd) == [True] * 4

    with_a_crowd(work)
