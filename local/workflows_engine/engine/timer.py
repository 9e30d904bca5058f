"""One timer for the whole engine: it sleeps until the earliest moment at which a wait or an execution is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import LeaseLost
from .core import Core

NEVER = float("inf")


class Timer:
    """`next_due()` reads the earliest due moment; `on_due()` handles everything that is due."""

    def __init__(self, core: Core) -> None:
        self.next_due: Callable[[], float | None] = lambda: None
        self.on_due: Callable[[], None] = lambda: None
        self._core = core
        self._task: asyncio.Task[None] | None = None
        self._due = NEVER

    def stop(self) -> list[asyncio.Task[None]]:
        """Cancel the sleep; returns the cancelled tasks."""
        task, self._task, self._due = self._task, None, NEVER
        if task is None:
            return []
        task.cancel()
        return [task]

    def schedule(self, due: float) -> None:
        """Wake up at `due`, unless the timer wakes up earlier anyway."""
        if self._core.inbox.loop is None or due >= self._due:
            return
        if self._task is not None:
            self._task.cancel()
        self._due = due
        self._task = self._core.inbox.loop.create_task(self._sleep(due))

    def reschedule(self) -> None:
        """Wake up at the earliest due moment in the database."""
        self._due = NEVER
        due = self.next_due() if self._core.inbox.loop is not None else None
        if due is not None:
            self.schedule(due)

    async def _sleep(self, due: float) -> None:
        await self._core.clock.sleep_until(due)
        self._task = None
        self._due = NEVER
        try:
            self.on_due()
        except LeaseLost:
            self._core.inbox.lose_lease()
