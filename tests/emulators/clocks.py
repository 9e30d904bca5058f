"""A clock that a test stops, so that it can observe states that otherwise pass."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from dropforge_local.base.clock import SystemClock


class HeldClock(SystemClock):
    """The system's clock. While a test holds it, no wait for a later time ends."""

    def __init__(self) -> None:
        self._is_held = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    async def sleep_until(self, when: float) -> None:
        await super().sleep_until(when)
        while self._is_held:
            await asyncio.sleep(0.01)
