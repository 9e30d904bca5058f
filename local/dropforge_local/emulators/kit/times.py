"""Times as Google's APIs write them in JSON."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(seconds: float, timespec: str = "microseconds") -> str:
    """A Unix time in UTC with a final Z; `timespec` is that of `datetime.isoformat`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec=timespec).replace("+00:00", "Z")
