"""Quantities: "500m", "1.5Gi", "1e3". Grammar: k8s.io/apimachinery/pkg/api/resource."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?[0-9]{1,3}))?")
SUFFIXES = {
    "": Fraction(1),
    **{suffix: Fraction(1, 1000**power) for power, suffix in enumerate("mun", 1)},
    **{suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", 1)},
}


def parse_quantity(text: object) -> Fraction:
    """The exact number. Raises ValueError: not a quantity."""
    match = QUANTITY.fullmatch(str(text)) if isinstance(text, str | int | float | Decimal) else None
    if match is None or isinstance(text, bool):
        raise ValueError(f"quantities must match the regular expression '{QUANTITY.pattern}', not {text!r}")
    number, suffix, exponent = match.groups()
    scale = Fraction(10) ** int(exponent) if exponent else SUFFIXES[suffix or ""]
    return Fraction(Decimal(number)) * scale


def whole(text: object) -> int:
    """The quantity rounded up to an integer, as the API rounds bytes and devices."""
    return -int(-parse_quantity(text) // 1)
