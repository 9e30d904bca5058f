"""Calls that start other executions: `experimental.executions.run` and `.map`, and the connector's `run`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..errors import EngineError, WorkflowError, system_error
from ..interpreter.answers import error_value
from ..interpreter.waits import Wait
from ..records import ExecutionRecord
from ..values import NotJson, Value, to_json


def requested_executions(wait: Wait, parent: str) -> list[tuple[str, str]]:
    """(workflow name, argument as JSON) of each execution that the call requests. Raises WorkflowError."""
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


def joined_result(wait: Wait, children: Sequence[ExecutionRecord]) -> tuple[Value, bool]:
    """(value, is an error) for the call that started these finished executions."""
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


def missing(wait: Wait) -> WorkflowError:
    """The error of a call whose executions do not exist after a restart."""
    return system_error("OperationError", f"{wait.call}: an execution was refused or deleted while the engine stopped")


def refusal(error: EngineError) -> WorkflowError:
    """A refusal of the Executions API as the HttpError that the workflow sees."""
    code = {"NOT_FOUND": 404, "RESOURCE_EXHAUSTED": 429}.get(error.status, 400)
    message = f"HTTP server responded with error code {code}"
    body = {"error": {"code": code, "message": str(error), "status": error.status}}
    value = {"tags": ["HttpError"], "message": message, "code": code, "headers": {}, "body": body}
    return WorkflowError(value, context=message)
