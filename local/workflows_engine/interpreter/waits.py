"""What a thread waits for, made from the blocking call and its arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ..clock import parse_timestamp
from ..errors import system_error
from ..limits import Limits
from ..values import Value, kind
from .http_requests import stored_request

RUN_EXECUTION: Final = "googleapis.workflowexecutions.v1.projects.locations.workflows.executions.run"
CALLBACK_TIMEOUT: Final = 43200.0  # seconds; the documented default of events.await_callback


@dataclass
class Wait:
    """The call that a thread waits for. `seq` numbers the thread's waits: the thread ignores answers to older ones."""

    thread: int
    seq: int
    kind: str  # http, connector, sleep, callback, execution
    call: str
    detail: dict[str, Value] = field(default_factory=dict)
    due: float | None = None
    ref: str | None = None  # the callback that the thread waits for
    step: str = ""


class WaitFactory:
    """Makes the waits of an execution; checks the arguments that are not the business of an effect."""

    def __init__(self, execution: str, limits: Limits) -> None:
        self._execution = execution
        self._limits = limits

    def make(self, thread: int, seq: int, call: str, arguments: dict[str, Value], now: float) -> Wait:
        """The wait for a blocking call. Raises WorkflowError for arguments that the call refuses."""
        if call.startswith("http."):
            return Wait(thread, seq, "http", call, stored_request(call, arguments, self._limits))
        if call == "retry":
            return Wait(thread, seq, "sleep", call, {}, now + arguments["seconds"])
        if call == "sys.sleep":
            return Wait(thread, seq, "sleep", call, {}, now + self._sleep_seconds(arguments.get("seconds")))
        if call == "sys.sleep_until":
            return Wait(thread, seq, "sleep", call, {}, _timestamp(arguments.get("time")))
        if call == "events.await_callback":
            ref, timeout = self._callback(arguments)
            return Wait(thread, seq, "callback", call, {}, now + timeout, ref)
        if call.startswith("experimental.executions.") or call == RUN_EXECUTION:
            return Wait(thread, seq, "execution", call, arguments)
        return Wait(thread, seq, "connector", call, {"arguments": arguments, "began": now})

    def _sleep_seconds(self, seconds: Value) -> float:
        if type(seconds) is not int and type(seconds) is not float:
            raise system_error("TypeError", f"sys.sleep: argument 'seconds' must be a number; got: {kind(seconds)}")
        if not 0 <= seconds <= self._limits.sleep_seconds:
            raise system_error(
                "ValueError", f"sys.sleep: seconds must be 0 to {self._limits.sleep_seconds}; got: {seconds}"
            )
        return float(seconds)

    def _callback(self, arguments: dict[str, Value]) -> tuple[str, float]:
        """(ref of the callback, timeout in seconds)."""
        callback, timeout = arguments.get("callback"), arguments.get("timeout")
        timeout = CALLBACK_TIMEOUT if timeout is None else timeout
        if type(callback) is not dict or type(callback.get("url")) is not str:
            raise system_error("TypeError", "events.await_callback: argument 'callback' must be a map with 'url'")
        if type(timeout) is not int and type(timeout) is not float:
            raise system_error(
                "TypeError", f"events.await_callback: argument 'timeout' must be a number; got: {kind(timeout)}"
            )
        if not 0 <= timeout <= self._limits.duration_seconds:
            raise system_error("ValueError", f"events.await_callback: timeout {timeout} is out of range")
        head, _, ref = callback["url"].rpartition("/callbacks/")
        if not head.endswith(self._execution) or not ref:
            raise system_error("ValueError", "events.await_callback: the callback was not created by this execution")
        return ref, timeout


def _timestamp(value: Value) -> float:
    if type(value) is not str:
        raise system_error("TypeError", f"sys.sleep_until: argument 'time' must be a string; got: {kind(value)}")
    try:
        return parse_timestamp(value)
    except ValueError as error:
        message = f"sys.sleep_until: {value[:60]!r} is not a timestamp such as 2024-07-12T14:50:33Z"
        raise system_error("ValueError", message) from error
