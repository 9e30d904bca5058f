"""The time of day, a clock for measuring, and sleep: everything a module needs of time."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class Clock:
    """The clock of this machine. A test or a simulation passes its own clock."""

    def now(self) -> datetime:
        """The time of day, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes backwards."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)


def utc_now() -> datetime:
    """The time of day, for code that has no context: the command line and the containers."""
    return datetime.now(UTC)
