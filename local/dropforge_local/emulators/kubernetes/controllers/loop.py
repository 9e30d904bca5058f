"""The control loop: a change makes keys dirty; the loop reconciles dirty keys, again when a reconciliation is due."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Iterable
from typing import Protocol

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from ...kit.background import first
from ..store import Change

log = logging.getLogger(__name__)

Key = tuple[str, str]
FAILURE_SECONDS = 5.0


class Controller(Protocol):
    """Level-triggered: `reconcile` reads the present state, not the changes that led to it."""

    def keys(self, change: Change) -> Iterable[Key]:
        """The keys that a change makes dirty, as (namespace, name) or another pair that the controller defines."""

    def all_keys(self) -> Iterable[Key]:
        """The keys of all objects: each start reconciles all of them."""

    def reconcile(self, key: Key) -> float | None:
        """Do what is due, inside a transaction; return when to reconcile again even without a change, or None."""


class ControlLoop:
    """Runs a cluster's controllers, one key after the other; sleeps while no key is dirty or due."""

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

    def reconcile_all(self, controller: Controller) -> None:
        """Reconcile all keys of a controller: a condition outside of the objects has changed."""
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
            # A failed object must not stop the reconciliation of the others.
            log.exception("%s of %s failed", type(self._controllers[index]).__name__, key)
            again = self._clock.now() + FAILURE_SECONDS
        if again is not None:
            heapq.heappush(self._timers, (again, index, key))

    async def _sleep(self) -> None:
        """Sleep until a key is dirty or due."""
        self._wake.clear()
        timers = [self._clock.sleep_until(self._timers[0][0])] if self._timers else []
        await first(self._wake.wait(), *timers)
        while self._timers and self._timers[0][0] <= self._clock.now():
            _, index, key = heapq.heappop(self._timers)
            self._dirty[index, key] = None
