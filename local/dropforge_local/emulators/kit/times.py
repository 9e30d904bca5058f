"""Times as Google's APIs write them in JSON and in protobuf messages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from google.protobuf import timestamp_pb2


def rfc3339(seconds: float, timespec: str = "microseconds") -> str:
    """A Unix time in UTC with a final Z; `timespec` is that of `datetime.isoformat`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def timestamp(seconds: float) -> timestamp_pb2.Timestamp:
    """A Unix time as a message, in microseconds. Raises ValueError or OverflowError for a time that it cannot hold."""
    result = timestamp_pb2.Timestamp()
    result.FromMicroseconds(round(seconds * 1e6))
    return result


def seconds_of(message: Any) -> float:
    """A google.protobuf.Duration or Timestamp as a number."""
    return float(message.seconds + message.nanos / 1e9)
