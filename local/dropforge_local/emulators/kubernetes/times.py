"""Times as the API writes them: RFC 3339, UTC, whole seconds."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def timestamp(when: float) -> str:
    return datetime.fromtimestamp(math.floor(when), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """Unix time of a timestamp. Raises ValueError."""
    parsed = datetime.fromisoformat(text)
    return parsed.replace(tzinfo=parsed.tzinfo or UTC).timestamp()
