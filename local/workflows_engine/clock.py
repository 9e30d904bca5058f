"""Time as a parameter: the wall clock, or a virtual clock that tests advance; and timestamps as seconds."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

_TIMESTAMP: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:[Zz]|([+-])(\d\d):(\d\d))", re.ASCII
)


def parse_timestamp(text: str) -> float:
    """Seconds since the Unix epoch of a timestamp by https://www.rfc-editor.org/rfc/rfc3339#section-5.6, to the
    microsecond. Second 60, a leap second, is the beginning of the next minute. Raises ValueError."""
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise ValueError("not by RFC 3339")
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    fraction, sign, hours, minutes = match.groups()[6:]
    if second > 60 or int(hours or 0) > 23 or int(minutes or 0) > 59:
        raise ValueError("out of range")
    offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0))
    later = timedelta(seconds=second, microseconds=int((fraction or "0")[:6].ljust(6, "0")))
    moment = datetime(year, month, day, hour, minute, tzinfo=UTC)
    try:
        return (moment + later + (offset if sign == "-" else -offset)).timestamp()
    except OverflowError as error:
        raise ValueError("out of range") from error


class Clock(Protocol):
    """The engine's only source of time."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""

    async def sleep_until(self, when: float) -> None:
        """Return when `now() >= when`."""


class SystemClock:
    """The machine's wall clock."""

    def now(self) -> float:
        return time.time()

    async def sleep_until(self, when: float) -> None:
        while (delay := when - time.time()) > 0:
            await asyncio.sleep(delay)


class VirtualClock:
    """A clock that moves only by `advance`, so that a test waits a week in a millisecond."""

    def __init__(self, start: float = 1_750_000_000.0) -> None:
        self._now = start
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    async def sleep_until(self, when: float) -> None:
        if when <= self._now:
            return
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (when, next(self._order), wake))
        await wake

    def next_wake(self) -> float | None:
        """The moment at which the earliest sleeper is due, or None if there is no sleeper."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    def advance(self, to: float) -> None:
        """Move the clock forward to `to` (never back), and wake the sleepers that are due, in order."""
        self._now = max(self._now, to)
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                wake.set_result(None)
