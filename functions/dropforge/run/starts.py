"""How long the parts of a server's last start took: machines/<run>/serve/start.json, which the server writes.

Only containers of the run can write there. Figures of another form count as none, and no deployment waits for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dropforge.base import names
from dropforge.cloud.classify import client_errors
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.objects import read_at_most

PARTS = ("program", "check of the model", "weights", "adapters", "compiled code", "engine")
MAX_BYTES = 4096
MAX_SECONDS = 86400.0
_NAME = "start.json"


def read_start(client: Any, bucket: str, run: str) -> dict[str, float]:
    """The seconds of each part of the last start of a server of the run; {} if they are unknown."""
    blob = client.bucket(bucket).blob(names.server_object(run, _NAME))
    try:
        data = read_at_most(blob, MAX_BYTES, TIMEOUT_SECONDS)
    except client_errors():
        return {}
    try:
        document = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    found = document if isinstance(document, dict) else {}
    return {part: float(found[part]) for part in PARTS if _is_seconds(found.get(part))}


def write_start(client: Any, bucket: str, run: str, seconds: Mapping[str, float]) -> None:
    """Raises client errors."""
    blob = client.bucket(bucket).blob(names.server_object(run, _NAME))
    blob.upload_from_string(json.dumps(dict(seconds)), "application/json", timeout=TIMEOUT_SECONDS)


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_SECONDS
