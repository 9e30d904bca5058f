"""The origin of a fact in a catalog. Every entry of a catalog names its page or issue, and the day of the reading."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True)
class Source:
    """A page or a public issue, and the day of its text, or else of our reading."""

    url: str
    as_of: date
