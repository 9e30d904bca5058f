"""One line of JSON per log entry, in the fields that Cloud Logging reads (severity, message, time) plus stage and run.

https://cloud.google.com/logging/docs/structured-logging#special-payload-fields
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.parse import quote

from .names import is_run_id, trace_id
from .redact import redact

TRACE = "logging.googleapis.com/trace"


class Log(Protocol):
    """A function that writes one log entry."""

    def __call__(self, message: str, *, stage: str, run: str = "", severity: str = "INFO", **fields: Any) -> None: ...


def log(message: str, *, stage: str, run: str = "", severity: str = "INFO", **fields: Any) -> None:
    """Write one log entry to stderr, without credentials."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": time, "severity": severity, "message": message, "stage": stage, "run": run, **fields}
    # Each text first, because the escapes of JSON hide credentials; then the line, where a key may tell one.
    text = redact(json.dumps(_redacted(line)))
    # One call of write: several threads may log at the same time.
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def explorer(project: str, query: str, since: datetime) -> str:
    """The address of the Logs Explorer with the entries of a query.

    A time in the query replaces the page's own range of an hour:
    https://cloud.google.com/logging/docs/view/logs-explorer-interface
    """
    query = f'{query}\ntimestamp>="{since.isoformat(timespec="seconds")}"'
    return f"https://console.cloud.google.com/logs/query;query={quote(query, safe='')}?project={quote(project)}"


def _redacted(value: Any) -> Any:
    """`value` in the types of JSON, each text and key of it without credentials."""
    if isinstance(value, dict):
        return {redact(str(key)): _redacted(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else redact(str(value))


def traced(project: str) -> Log:
    """A log whose entries about a run name the run's trace: Cloud Logging and Cloud Trace show them together.

    https://cloud.google.com/trace/docs/trace-log-integration
    """

    def write(message: str, *, stage: str, run: str = "", severity: str = "INFO", **fields: Any) -> None:
        # A request may name any text as its run.
        trace = {TRACE: f"projects/{project}/traces/{trace_id(run)}"} if is_run_id(run) else {}
        log(message, stage=stage, run=run, severity=severity, **fields, **trace)

    return write
