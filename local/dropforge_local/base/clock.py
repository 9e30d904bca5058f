"""Time as a parameter: every part of the local stack receives a clock; tests pass a clock that they move."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """The clock that the local stack uses. The workflow engine's clocks satisfy it too."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""

    async def sleep_until(self, when: float) -> None:
        """Return once `now() >= when`; at once if that time is past."""


class SystemClock:
    """The machine's wall clock."""

    def now(self) -> float:
        return time.time()

    async def sleep_until(self, when: float) -> None:
        while (delay := when - time.time()) > 0:
            await asyncio.sleep(delay)
