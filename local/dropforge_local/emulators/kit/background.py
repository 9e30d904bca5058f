"""Background work: tasks with an owner, waits for the first of several events, and a stop that leaves nothing running.

An emulator keeps the intent of its background work in the database. A stop may therefore cancel every task: the next
start reads the intent and resumes the work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Background:
    """The tasks of one owner. A task that fails is logged under the owner's name, unless `answers` has its error."""

    def __init__(self, owner: str, answers: tuple[type[Exception], ...] = ()) -> None:
        self._owner = owner
        self._answers = answers  # errors that the awaiter of a task receives as its answer
        self._tasks: set[asyncio.Task[Any]] = set()
        self.stopping = False

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` as a task of this owner. A task that starts after `stop` is cancelled at once."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        if self.stopping:
            task.cancel()
        return task

    async def stop(self) -> None:
        """Cancel every task, also those that start meanwhile, and wait until all have ended."""
        self.stopping = True
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, self._answers):
            log.error("background work of %s failed; the next start resumes it", self._owner, exc_info=error)


class Changes:
    """Wakes every task that waits for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Report a change. Later waiters wait for the next change."""
        self._event.set()
        self._event = asyncio.Event()

    def wait(self) -> Coroutine[Any, Any, bool]:
        """Wait for the first change after this call, even if the caller awaits the result later."""
        return self._event.wait()

    async def until(self, is_reached: Callable[[], bool], seconds: float) -> None:
        """Return when `is_reached()` is true after a change, or after `seconds` at the latest."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not is_reached() and (left := deadline - loop.time()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), left)


async def first(*waits: Awaitable[Any]) -> None:
    """Return when the first of `waits` has ended; cancel the others and wait for their end."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stop_all(*stops: Callable[[], Awaitable[object]]) -> None:
    """Run every stop in the given order, also after one has raised; then raise the last error."""
    async with AsyncExitStack() as stack:
        for stop in reversed(stops):
            stack.push_async_callback(stop)
