"""Prices with their date and source. A price that a catalog does not have is unknown (None), never zero."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Price:
    """The price of a unit for an hour, the regions where it holds, its date and its source."""

    usd_per_hour: float
    regions: tuple[str, ...]
    as_of: date
    source: str


@dataclass(frozen=True)
class HourlyPrice:
    """The price of a whole machine for an hour. If it is unknown, `usd_per_hour` is None and `source` says why."""

    usd_per_hour: float | None
    as_of: date | None
    source: str

    def times(self, machines: int) -> HourlyPrice:
        """The price of several such machines."""
        total = None if self.usd_per_hour is None else self.usd_per_hour * machines
        return replace(self, usd_per_hour=total)
