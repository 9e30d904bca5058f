"""Waiting without polling for a subscription's change, or for a time on the stack's clock."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from dropforge_local.base.clock import Clock

from ..kit.background import first

log = logging.getLogger(__name__)

DATABASE_RETRY_SECONDS = 1.0


class Wakes:
    """Per subscription, the events of the tasks that wait for its messages."""

    def __init__(self) -> None:
        self._events: defaultdict[int, set[asyncio.Event]] = defaultdict(set)

    @contextmanager
    def listen(self, subscription_id: int) -> Iterator[asyncio.Event]:
        """An event that is set when the subscription may have a new message."""
        event = asyncio.Event()
        self._events[subscription_id].add(event)
        try:
            yield event
        finally:
            self._events[subscription_id].discard(event)
            if not self._events[subscription_id]:
                del self._events[subscription_id]

    def wake(self, subscription_id: int) -> None:
        for event in self._events.get(subscription_id, ()):
            event.set()

    def wake_all(self) -> None:
        for subscription_id in list(self._events):
            self.wake(subscription_id)


async def wait(event: asyncio.Event, clock: Clock, until: float | None) -> None:
    """Return when `event` is set or the clock reaches `until` (None: never)."""
    if until is None:
        await event.wait()
        return
    await first(event.wait(), clock.sleep_until(until))


async def supervise(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` until it returns. Run it again after a database error, such as a full disk: delivery must continue."""
    while True:
        try:
            return await work()
        except sqlite3.Error:
            log.exception("%s failed; trying again in %g s", name, DATABASE_RETRY_SECONDS)
            await asyncio.sleep(DATABASE_RETRY_SECONDS)
