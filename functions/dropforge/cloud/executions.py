"""Executions of the workflow: start an execution for a run, find it again, wake it through its callback."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from dropforge.base import names

from .clients import TIMEOUT_SECONDS
from .context import Cloud

# Answers after which a callback needs no retry. 404: the execution has ended; 429: a request waits in the callback's
# slot already, so the execution will wake.
SETTLED = frozenset({200, 404, 409, 410, 429})
TAKEN = frozenset({200, 429})  # answers of a callback whose execution has not ended
# States of an execution that has not ended. The API does not know whether the last two have ended.
LIVE = frozenset({"ACTIVE", "QUEUED", "UNAVAILABLE", "STATE_UNSPECIFIED"})
LONGEST_PAGE = 1000  # executions without arguments and results


def start_execution(cloud: Cloud, run: str) -> str:
    """Start an execution for a run; return its id. Not idempotent: the API accepts no id from the caller."""
    from google.cloud.workflows import executions_v1

    # An argument has at most 32 KB and appears in logs; the workflow needs only the run's id.
    execution = executions_v1.Execution(argument=json.dumps({"run": run}), labels=names.labels(run, {}))
    created = cloud.clients.workflow_executions().create_execution(
        parent=cloud.settings.workflow_name, execution=execution, timeout=TIMEOUT_SECONDS
    )
    return _id(created)


def start_rollout(cloud: Cloud, endpoint: str, rollout: str) -> str:
    """Start an execution for a rollout of a named endpoint; return its id. Not idempotent, as `start_execution`."""
    from google.cloud.workflows import executions_v1

    argument = json.dumps({"endpoint": endpoint, "rollout": rollout})
    labels = {names.MANAGED_BY: "dropforge", names.ENDPOINT_LABEL: endpoint, names.ROLLOUT_LABEL: rollout}
    created = cloud.clients.workflow_executions().create_execution(
        parent=cloud.settings.rollout_workflow_name,
        execution=executions_v1.Execution(argument=argument, labels=labels),
        timeout=TIMEOUT_SECONDS,
    )
    return _id(created)


def live_executions(cloud: Cloud, workflow: str = "") -> frozenset[str]:
    """The ids of all executions of a workflow that have not ended; by default of the workflow of runs."""
    from google.cloud.workflows import executions_v1

    live: set[str] = set()
    for state in ("ACTIVE", "QUEUED"):
        request = executions_v1.ListExecutionsRequest(
            parent=workflow or cloud.settings.workflow_name, filter=f'state="{state}"', page_size=LONGEST_PAGE
        )
        live.update(map(_id, cloud.clients.workflow_executions().list_executions(request, timeout=TIMEOUT_SECONDS)))
    return frozenset(live)


def state_of(cloud: Cloud, execution: str) -> str:
    """The state of an execution, by the API's name; "" if it does not exist, or exists no longer."""
    from google.api_core.exceptions import NotFound

    name = f"{cloud.settings.workflow_name}/executions/{execution}"
    try:
        return str(cloud.clients.workflow_executions().get_execution(name=name, timeout=TIMEOUT_SECONDS).state.name)
    except NotFound:
        return ""


def find_execution(cloud: Cloud, run: str, since: datetime) -> str | None:
    """The id of the newest live execution for a run that started at or after `since`; None if there is none."""
    return _newest_live(cloud, cloud.settings.workflow_name, {names.RUN_LABEL: run}, since)


def find_rollout(cloud: Cloud, endpoint: str, rollout: str, since: datetime) -> str | None:
    """The id of the newest live execution for a rollout, as `find_execution`."""
    labels = {names.ENDPOINT_LABEL: endpoint, names.ROLLOUT_LABEL: rollout}
    return _newest_live(cloud, cloud.settings.rollout_workflow_name, labels, since)


def _newest_live(cloud: Cloud, workflow: str, labels: dict[str, str], since: datetime) -> str | None:
    from google.cloud.workflows import executions_v1

    request = executions_v1.ListExecutionsRequest(parent=workflow, view=executions_v1.ExecutionView.FULL, page_size=100)
    for execution in cloud.clients.workflow_executions().list_executions(request, timeout=TIMEOUT_SECONDS):
        if execution.start_time and execution.start_time < since:  # a queued execution has no start time yet
            return None  # the list begins with the newest: the rest is older
        if labels.items() <= dict(execution.labels).items() and execution.state.name in LIVE:
            return _id(execution)
    return None


def wake(cloud: Cloud, callback_url: str, body: dict[str, Any]) -> int:
    """Wake the execution that waits at `callback_url`; the status of the answer. If it is not in SETTLED, try again.

    The body is a hint for people who read the execution's history: the workflow calls `inspect` for the facts.
    """
    response = cloud.clients.callbacks().post(callback_url, json=body, timeout=TIMEOUT_SECONDS)
    return int(response.status_code)


def _id(execution: Any) -> str:
    """Only the id: the service writes the project's number into names, other APIs write its id."""
    return str(execution.name).rsplit("/", 1)[1]
