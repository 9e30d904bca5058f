"""Times, money and numbers as people read them, in the terminal and in the console."""

from __future__ import annotations

import math

NOT_FINITE = "not finite"  # NaN and the infinities


def age(seconds: float) -> str:
    """Return a length of time in one unit and at most six characters: `45 s`, `90 min`, `30 h`, `12 d`."""
    for unit, length, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < most:
            return f"{max(0.0, seconds) // length:.0f} {unit}"
    return f"{seconds // 86_400:.0f} d"


def duration(seconds: float) -> str:
    """Return `5025` as "1 h 24 min" and `12.34` as "12.3 s"."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24) if hours >= 48 else (0, hours)
    parts = [f"{count} {unit}" for count, unit in ((days, "d"), (hours, "h"), (minutes, "min")) if count]
    return " ".join(parts)


def usd(amount: float | None) -> str:
    """Return US dollars: four decimals below $1, else two. An unknown amount is "unknown", a tiny one is never 0."""
    if amount is None:
        return "unknown"
    if amount < 0:
        return f"-{usd(-amount)}"
    if 0 < amount < 0.00005:
        return "< $0.0001"
    return f"${amount:.4f}" if 0 < round(amount, 4) < 1 else f"${abs(amount):.2f}"


def number(value: float | None) -> str:
    """Return a metric: a whole number without decimals, any other number with four digits, or "not finite"."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return NOT_FINITE
    return f"{value:,.0f}" if (value == round(value) and abs(value) >= 1) or abs(value) >= 10_000 else f"{value:.4g}"
