"""Compute Engine's JSON: its operation is a resource of its own, and its times have milliseconds."""

from __future__ import annotations

import zlib
from datetime import UTC, datetime
from typing import Any

from ..kit.operations import Operation

LINK = "https://www.googleapis.com/compute/v1"


def operation_json(operation: Operation) -> dict[str, Any]:
    """https://cloud.google.com/compute/docs/reference/rest/v1/zoneOperations"""
    started = timestamp(operation.created)
    body = {
        "kind": "compute#operation",
        "id": str(zlib.crc32(operation.name.encode())),
        "name": operation.name.rsplit("/", 1)[1],
        "zone": f"{LINK}/{operation.parent}",
        "operationType": operation.verb,
        "targetLink": f"{LINK}/{operation.target}",
        **operation.metadata,
        "status": "RUNNING",
        "progress": 0,
        "insertTime": started,
        "startTime": started,
        "selfLink": f"{LINK}/{operation.name}",
    }
    if operation.ended is None:
        return body
    return {**body, "status": "DONE", "progress": 100, "endTime": timestamp(operation.ended)}


def timestamp(when: float) -> str:
    """RFC 3339 with milliseconds."""
    return datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")
