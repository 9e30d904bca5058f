"""A clock that a test stops or moves, so that it can observe states that otherwise pass, or take long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dropforge_local.base.clock import SystemClock


class HeldClock(SystemClock):
    """The system's clock. While a test holds it, no wait for a later time ends. A test can also move it forward."""

    def __init__(self) -> None:
        self._is_held = False
        self._ahead = 0.0

    def now(self) -> float:
        return time.time() + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += seconds

    @contextmanager
    def hold(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    async def sleep_until(self, when: float) -> None:
        while self._is_held or self.now() < when:
            await asyncio.sleep(0.01 if self._is_held else min(when - self.now(), 0.05))
