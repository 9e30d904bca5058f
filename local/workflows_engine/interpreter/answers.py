"""The values that answer waits: errors, the end of a timer, a callback's request."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from ..errors import WorkflowError, system_error
from ..values import Value
from .http_requests import canonical_header
from .waits import Wait


def error_value(error: WorkflowError) -> Value:
    """An error as an answer that the database can store; `error_of` reads it."""
    return {"value": error.value, "context": error.context, "catchable": error.catchable}


def error_of(answer: Value) -> WorkflowError:
    """The error that `error_value` stored."""
    return WorkflowError(answer["value"], context=answer.get("context"), catchable=answer.get("catchable", True))


def timer_result(wait: Wait) -> tuple[Value, bool]:
    """(value, is an error) for a wait whose time is over: a sleep ends, every other call times out."""
    if wait.kind == "sleep":
        return None, False
    return error_value(system_error("TimeoutError", f"{wait.call} timed out")), True


def callback_value(method: str, headers: Mapping[str, str], query: Value, body: Value, url: str, now: float) -> Value:
    """The value of `events.await_callback`. The workflow does not see the sender's token."""
    shown = {canonical_header(name): value for name, value in headers.items() if name.lower() != "authorization"}
    received = datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {
        "http_request": {"body": body, "headers": shown, "method": method, "query": query, "url": url},
        "received_time": received,
        "type": "HTTP",
    }
