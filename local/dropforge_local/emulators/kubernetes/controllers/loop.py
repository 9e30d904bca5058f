"""The control loop: a change makes keys dirty, a dirty key is reconciled, a reconciliation may ask to be repeated."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Iterable
from typing import Protocol

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from ..store import Change

log = logging.getLogger(__name__)

Key = tuple[str, str]
FAILURE_SECONDS = 5.0


class Controller(Protocol):
    """Level-triggered: `reconcile` looks at what is, whatever happened before."""

    def keys(self, change: Change) -> Iterable[Key]:
        """Which objects a change makes worth a look, as (namespace, name) or what the controller uses as such."""

    def all_keys(self) -> Iterable[Key]:
        """Every object; looked at once at each start."""

    def reconcile(self, key: Key) -> float | None:
        """Do what is due, inside a transaction; answers when to look again whatever happens."""


class ControlLoop:
    """Runs one cluster's controllers, one key after the other; asleep while nothing is dirty and nothing due."""

    def __init__(self, db: Database, clock: Clock, controllers: Iterable[Controller]) -> None:
        self._db = db
        self._clock = clock
        self._controllers = list(controllers)
        self._dirty: dict[tuple[int, Key], None] = {}
        self._timers: list[tuple[float, int, Key]] = []
        self._wake = asyncio.Event()

    def on_change(self, change: Change) -> None:
        for index, controller in enumerate(self._controllers):
            self._mark(index, controller.keys(change))

    def look_again(self, controller: Controller) -> None:
        """Reconcile everything of one controller: something that it depends on changed outside the objects."""
        self._mark(self._controllers.index(controller), controller.all_keys())

    async def run(self) -> None:
        for index, controller in enumerate(self._controllers):
            self._mark(index, controller.all_keys())
        while True:
            while self._dirty:
                index, key = next(iter(self._dirty))
                del self._dirty[index, key]
                self._reconcile(index, key)
                await asyncio.sleep(0)
            await self._sleep()

    def _mark(self, index: int, keys: Iterable[Key]) -> None:
        for key in keys:
            self._dirty[index, key] = None
            self._wake.set()

    def _reconcile(self, index: int, key: Key) -> None:
        try:
            with self._db.transaction():
                again = self._controllers[index].reconcile(key)
        except Exception:
            # One object that cannot be handled must not stop the others.
            log.exception("%s of %s failed", type(self._controllers[index]).__name__, key)
            again = self._clock.now() + FAILURE_SECONDS
        if again is not None:
            heapq.heappush(self._timers, (again, index, key))

    async def _sleep(self) -> None:
        """Until something is dirty or due."""
        self._wake.clear()
        if self._timers:
            timer = asyncio.ensure_future(self._clock.sleep_until(self._timers[0][0]))
            wake = asyncio.ensure_future(self._wake.wait())
            try:
                await asyncio.wait([timer, wake], return_when=asyncio.FIRST_COMPLETED)
            finally:
                timer.cancel()
                wake.cancel()
        else:
            await self._wake.wait()
        while self._timers and self._timers[0][0] <= self._clock.now():
            _, index, key = heapq.heappop(self._timers)
            self._dirty[index, key] = None
