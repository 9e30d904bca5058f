"""Time as a parameter: the local stack's parts are given a clock, and tests give them one that they move."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What the local stack asks of time. The workflow engine's clocks fit as well."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""

    async def sleep_until(self, when: float) -> None:
        """Return once `now() >= when`; at once if it already is."""


class SystemClock:
    """The machine's wall clock."""

    def now(self) -> float:
        return time.time()

    async def sleep_until(self, when: float) -> None:
        while (delay := when - time.time()) > 0:
            await asyncio.sleep(delay)
