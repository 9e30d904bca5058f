"""What the engine does for waiting threads, and the values that come back."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from . import http
from .connectors import Later
from .errors import EngineError, WorkflowError, system_error
from .machine import Wait
from .store import ExecutionRecord
from .values import NotJson, Value, to_json

if TYPE_CHECKING:
    from .engine import Engine

call_log = logging.getLogger(f"{__name__}.calls")
sys_log = logging.getLogger(f"{__name__}.sys_log")

_LEVELS = {
    "DEBUG": logging.DEBUG,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "ALERT": logging.CRITICAL,
    "EMERGENCY": logging.CRITICAL,
}


UNANSWERED = object()  # a mock leaves a callback to its time-out


async def perform(engine: Engine, wait: Wait, effect_id: str) -> Value | Later:
    """Do a call. Raises WorkflowError for what the workflow shall see as an error."""
    if engine.mocks is not None:
        answered, value = await engine.mocks.answer(wait, engine.now, engine.doze)
        if answered:
            return value
        if wait.kind in ("callback", "execution"):
            return UNANSWERED
    if wait.kind == "connector":
        return await engine.connectors.perform(engine, wait, effect_id)
    return await send(engine, wait.detail, effect_id, wait.call)


async def send(engine: Engine, request: Mapping[str, Value], effect_id: str, call: str) -> Value:
    bound = http.bind(request, effect_id, call, engine.token)
    return http.result_of(await engine.send(bound), engine.limits)


def may_repeat(request: Mapping[str, Value], repeatable: Callable[[str], bool]) -> bool:
    """True if sending a request twice does no more than sending it once."""
    return request["method"] in http.IDEMPOTENT or http.keyed(request["headers"]) or repeatable(request["url"])


def error_value(error: WorkflowError) -> Value:
    """A WorkflowError as the answer to a wait."""
    return {"value": error.value, "context": error.context, "catchable": error.catchable}


def timer_result(wait: Wait) -> tuple[Value, bool]:
    """What a due wait gets: sleep ends, everything else has timed out."""
    if wait.kind == "sleep":
        return None, False
    return error_value(system_error("TimeoutError", f"{wait.call} timed out")), True


def callback_value(method: str, headers: Mapping[str, str], query: Value, body: Value, url: str, now: float) -> Value:
    """What events.await_callback returns."""
    shown = {
        http.canonical(name): value for name, value in headers.items() if name.lower() != "authorization"
    }  # the sender's token is not the workflow's business
    received = datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {
        "http_request": {"body": body, "headers": shown, "method": method, "query": query, "url": url},
        "received_time": received,
        "type": "HTTP",
    }


# Sub-executions


def child_executions(wait: Wait, parent: str) -> list[tuple[str, str]]:
    """(workflow, argument) of each execution that a call asks for."""
    arguments = wait.detail
    _, project, _, location, *_ = parent.split("/")
    workflow = arguments.get("workflow_id")
    if type(workflow) is not str:
        raise system_error("TypeError", f"{wait.call}: argument 'workflow_id' must be a string")
    name = (
        f"projects/{arguments.get('project_id') or project}/locations/{arguments.get('location') or location}"
        f"/workflows/{workflow}"
    )
    many = arguments.get("arguments") if wait.call.endswith(".map") else [arguments.get("argument")]
    if type(many) is not list:
        raise system_error("TypeError", f"{wait.call}: argument 'arguments' must be a list")
    try:
        return [(name, to_json(argument)) for argument in many]
    except NotJson as error:
        raise system_error("ValueError", f"{wait.call}: {error}") from error


def children_result(wait: Wait, children: Sequence[ExecutionRecord]) -> tuple[Value, bool]:
    """The value (or error) of finished sub-executions for the call that started them."""
    for child in children:
        if child.state != "SUCCEEDED":
            operation = {
                "name": child.name,
                "state": child.state,
                "argument": child.argument,
                "error": dict(child.error) if child.error else None,
                "workflowRevisionId": child.revision_id,
            }
            error = system_error("OperationError", "Execution failed or cancelled.", prefix=False, operation=operation)
            return error_value(error), True
    values = [json.loads(child.result or "null") for child in children]
    return (values if wait.call.endswith(".map") else values[0]), False


def api_error(error: EngineError) -> WorkflowError:
    """A refusal of the Executions API as the HTTP error that a workflow would see."""
    code = {"NOT_FOUND": 404, "RESOURCE_EXHAUSTED": 429}.get(error.status, 400)
    message = f"HTTP server responded with error code {code}"
    body = {"error": {"code": code, "message": str(error), "status": error.status}}
    value = {"tags": ["HttpError"], "message": message, "code": code, "headers": {}, "body": body}
    return WorkflowError(value, context=message)


# Logs


def write_log(execution: str, entry: Mapping[str, Value]) -> None:
    """A sys.log entry, after it is committed."""
    level = _LEVELS.get(entry["severity"], logging.INFO)
    sys_log.log(level, "%s", _text(entry["data"]), extra={"execution": execution, "severity": entry["severity"]})


def write_call(execution: str, wait: Wait, error: WorkflowError | None) -> None:
    outcome = "ok" if error is None else f"failed: {error.context}"
    call_log.log(
        logging.INFO if error is None else logging.ERROR,
        "%s in step %s: %s",
        wait.call,
        wait.step,
        outcome,
        extra={"execution": execution},
    )


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return to_json(value)
    except NotJson:
        return repr(value)
