"""One JSON line per stage change, in the fields that Cloud Logging knows (severity, message) plus stage and run."""

from __future__ import annotations

import json
import sys
from typing import Any

from .redact import redact


def log(message: str, *, stage: str, run: str = "", severity: str = "INFO", **fields: Any) -> None:
    """Print one redacted log line."""
    line = {"severity": severity, "message": message, "stage": stage, "run": run, **fields}
    sys.stderr.write(redact(json.dumps(line, default=str)) + "\n")  # at once: several threads may log
    sys.stderr.flush()
