"""A limit on the number of events in an hour."""

from __future__ import annotations

from datetime import datetime


class Allowance:
    """Counts what happens in each hour of the clock. Its memory does not grow."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._hour = ""
        self._taken = 0

    def take(self, now: datetime) -> bool:
        """Whether it may happen once more in this hour."""
        hour = f"{now:%Y-%m-%dT%H}"
        self._hour, self._taken = hour, self._taken + 1 if hour == self._hour else 1
        return self._taken <= self.most

    @property
    def is_just_used_up(self) -> bool:
        """Whether the last `take` was the first that this hour refused."""
        return self._taken == self.most + 1
