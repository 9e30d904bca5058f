"""One line of JSON per log entry, in the fields that Cloud Logging reads (severity, message) plus stage and run."""

from __future__ import annotations

import json
import sys
from typing import Any, Protocol

from .redact import redact


class Log(Protocol):
    """A function that writes one log entry."""

    def __call__(self, message: str, *, stage: str, run: str = "", severity: str = "INFO", **fields: Any) -> None: ...


def log(message: str, *, stage: str, run: str = "", severity: str = "INFO", **fields: Any) -> None:
    """Write one log entry to stderr, without credentials."""
    line = {"severity": severity, "message": message, "stage": stage, "run": run, **fields}
    # One call of write: several threads may log at the same time.
    sys.stderr.write(redact(json.dumps(line, default=str)) + "\n")
    sys.stderr.flush()
