"""Executions of the workflow: start one for a run, find it again, wake it through its callback."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from dropforge.base import names
from dropforge.base.settings import Settings

from . import clients
from .clients import TIMEOUT_SECONDS

# A callback that nobody waits for any more: answered, and nothing to retry. 404: the execution has ended;
# 429: a request is waiting in the slot already, so the execution will wake.
SETTLED = frozenset({200, 404, 409, 410, 429})
# Of an execution that has not ended; of the last two nobody knows.
LIVE = frozenset({"ACTIVE", "QUEUED", "UNAVAILABLE", "STATE_UNSPECIFIED"})
LONGEST_PAGE = 1000  # of executions without their arguments and results


def start_execution(run: str, settings: Settings) -> str:
    """Start an execution for a run; its id. The API takes no id of ours, so this is not idempotent."""
    from google.cloud.workflows import executions_v1

    # An argument may have 32 KB and is kept in logs: the run's id is all that the workflow needs.
    execution = executions_v1.Execution(argument=json.dumps({"run": run}), labels=names.labels(run, {}))
    created = clients.workflow_executions().create_execution(
        parent=settings.workflow_name, execution=execution, timeout=TIMEOUT_SECONDS
    )
    return _id(created)


def live_executions(settings: Settings) -> frozenset[str]:
    """The ids of all executions that have not ended."""
    from google.cloud.workflows import executions_v1

    found: set[str] = set()
    for state in ("ACTIVE", "QUEUED"):
        request = executions_v1.ListExecutionsRequest(
            parent=settings.workflow_name, filter=f'state="{state}"', page_size=LONGEST_PAGE
        )
        found.update(map(_id, clients.workflow_executions().list_executions(request, timeout=TIMEOUT_SECONDS)))
    return frozenset(found)


def state_of(execution: str, settings: Settings) -> str:
    """The state of an execution, as the API names it; "" when it does not exist, or does not any more."""
    from google.api_core.exceptions import NotFound

    name = f"{settings.workflow_name}/executions/{execution}"
    try:
        return str(clients.workflow_executions().get_execution(name=name, timeout=TIMEOUT_SECONDS).state.name)
    except NotFound:
        return ""


def find_execution(run: str, since: datetime, settings: Settings) -> str | None:
    """The id of the newest live execution for a run that started at or after `since`; None when there is none."""
    from google.cloud.workflows import executions_v1

    request = executions_v1.ListExecutionsRequest(
        parent=settings.workflow_name, view=executions_v1.ExecutionView.FULL, page_size=100
    )
    for execution in clients.workflow_executions().list_executions(request, timeout=TIMEOUT_SECONDS):
        if execution.start_time and execution.start_time < since:  # one in the backlog (QUEUED) has none yet
            return None  # newest first: none of the rest can be ours
        if execution.labels.get(names.RUN_LABEL) == run and execution.state.name in LIVE:
            return _id(execution)
    return None


def _id(execution: Any) -> str:
    """Only the id: the service writes the project's number into names, other places its id."""
    return str(execution.name).rsplit("/", 1)[1]


def wake(callback_url: str, body: dict[str, Any]) -> bool:
    """Wake the execution that waits at `callback_url`. False: it will not come to hear of it; try again.

    The body is a hint for people who read the history: the workflow asks `inspect` for the truth.
    """
    response = clients.callbacks().post(callback_url, json=body, timeout=TIMEOUT_SECONDS)
    return response.status_code in SETTLED
