"""What the parts of the emulator share, and its background work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from dropforge_local.base.clock import Clock

from .capacity import Capacity
from .config import CloudRunConfig
from .faults import Faults
from .operations import Operations
from .store import Store
from .workloads import Unready, Workloads

log = logging.getLogger(__name__)


class Background:
    """Tasks that a stop of the emulator cancels; what they had to do is in the database and resumes at the next."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.stopping = False

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def stop(self) -> None:
        self.stopping = True
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Unready):  # that one is an answer; whoever waits gets it
            log.error("background work of Cloud Run failed", exc_info=error)


@dataclass(frozen=True)
class Context:
    store: Store
    operations: Operations
    faults: Faults
    capacity: Capacity
    workloads: Workloads
    clock: Clock
    config: CloudRunConfig
    background: Background = field(default_factory=Background)

    def now(self) -> float:
        return self.clock.now()

    async def settle(self) -> None:
        """Let pass the time that an operation takes at least."""
        await self.clock.sleep_until(self.clock.now() + self.config.operation_seconds)

    def log_uri(self, name: str) -> str:
        return f"{self.store.setting('origin', '')}/_local/logs/{name}"
