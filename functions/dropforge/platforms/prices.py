"""Prices with their date and source. A price that a catalog does not have is unknown (None), never zero."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Price:
    """What one unit costs for one hour, where, and who says so."""

    usd_per_hour: float
    regions: tuple[str, ...]
    as_of: date
    source: str


@dataclass(frozen=True)
class HourlyPrice:
    """The price of a whole machine for an hour, or why it is not known."""

    usd_per_hour: float | None
    as_of: date | None
    source: str

    def times(self, machines: int) -> HourlyPrice:
        """The price of several such machines."""
        total = None if self.usd_per_hour is None else self.usd_per_hour * machines
        return replace(self, usd_per_hour=total)
