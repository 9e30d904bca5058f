"""Stage `notify`: enter a state, tell other systems (run event) and people (Slack).

The state is written first; a message may therefore be sent twice, with the same event id, but never for a state that
was not reached.
"""

from __future__ import annotations

import json
from typing import Any

from . import clients, names
from .classify import client_errors
from .clients import TIMEOUT_SECONDS
from .errors import CloudError, Conflict, ErrorClass
from .events import RunEvent, run_event_message
from .log import log
from .outcome import superseded
from .runs import Record, RunError, RunState, Transition, open_store, utc_now
from .settings import settings
from .slack import send, slack_message
from .spec import JobSpec

PUBLISH_TIMEOUT_SECONDS = 20


def notify(run: str, execution: str, state: RunState, error: RunError | None) -> dict[str, Any]:
    """Enter `state` and tell everybody. Raises NotFound for an unknown run.

    Answers {"status": "NOTIFIED" | "UNTOLD" | "SUPERSEDED", "state": ...}; UNTOLD: the state is entered, but not
    everybody could be told: call again.
    """
    store = open_store()
    try:
        record = store.update(run, lambda found: _enter(found, execution, state, error))
    except Conflict as conflict:
        log(str(conflict), stage="notify", run=run, severity="WARNING")
        return superseded(store.record(run))
    if record.execution != execution or record.state is not state:
        return superseded(record)
    spec = store.spec(run)
    if state.is_terminal:
        store.put_new(names.report_object(run), json.dumps(report(record, spec), indent=2).encode())
    try:
        tell(record, spec)
    except CloudError:
        return {"status": "UNTOLD", "state": record.state}
    log(state.lower(), stage="notify", run=run)
    return {"status": "NOTIFIED", "state": record.state}


def report(record: Record, spec: JobSpec) -> dict[str, Any]:
    """What became of a run, for report.json: one page for people and scripts that come later."""
    kept = record.model_dump(mode="json", include={"run", "name", "source", "state", "created", "attempts", "metrics"})
    return {
        **kept,
        "ended": record.history[-1].time.isoformat(),
        "seconds_per_stage": record.stage_seconds(utc_now()),
        "training_cost_usd": record.training_cost(utc_now()),
        "endpoint": record.endpoint.model_dump(mode="json") if record.endpoint else None,
        "error": record.error.model_dump(mode="json") if record.error else None,
        "spec": spec.model_dump(mode="json", by_alias=True),
    }


def tell(record: Record, spec: JobSpec | None = None) -> None:
    """Publish the record's present state as a run event and, when people care about it, to Slack.

    Raises CloudError when a terminal state could not be told and trying again may help.
    """
    announce(record, record.state)
    tell_people(record, spec)


def tell_people(record: Record, spec: JobSpec | None = None) -> None:
    """Send the Slack message for the record's present state.

    Raises CloudError (TRANSIENT) when a terminal state could not be told and trying again may help; nobody should
    wait for Slack in the middle of a run.
    """
    message = slack_message(record, spec, settings(), utc_now())
    secret = spec.notify.slack.webhook_secret if spec and spec.notify.slack else settings().slack_webhook_secret
    if message is None or not secret:
        return
    problem, may_pass = send(secret, message, settings())
    if not problem:
        return
    log(problem, stage="notify", run=record.run, severity="ERROR")
    if may_pass and record.state.is_terminal:
        raise CloudError(ErrorClass.TRANSIENT, problem)


def announce(record: Record, state: RunState) -> None:
    """Publish a run event for `state`; its id is the same each time. Raises CloudError for a terminal state only:
    telling must hold up neither the training nor its teardown."""
    entered = next(t for t in reversed(record.history) if t.state is state)
    event = RunEvent(
        id=f"{record.run}/{entered.attempt}/{state.lower()}",
        run=record.run,
        state=state,
        time=entered.time,
        name=record.name,
        details=_details(record, entered),
    )
    data, attributes = run_event_message(event)
    topic = settings().topic(settings().run_events_topic)
    failures: tuple[type[Exception], ...] = (*client_errors(), TimeoutError)
    try:
        clients.publisher().publish(topic, data, timeout=TIMEOUT_SECONDS, **attributes).result(PUBLISH_TIMEOUT_SECONDS)
    except failures as error:
        problem = f"the run event {event.id} could not be published: {error or type(error).__name__}"
        log(problem, stage="notify", run=record.run, severity="ERROR")
        if state.is_terminal:
            raise CloudError(ErrorClass.TRANSIENT, problem) from error


def _details(record: Record, entered: Transition) -> dict[str, Any]:
    details: dict[str, Any] = {"source": record.source}
    if entered.attempt:
        details["attempt"] = entered.attempt
    if entered.state.is_terminal:
        details["metrics"] = record.metrics
        details["error"] = record.error.model_dump(mode="json") if record.error else None
        details["problems"] = record.problems
        details["endpoint"] = record.endpoint.model_dump(mode="json") if record.endpoint else None
        details["training_cost_usd"] = record.training_cost(utc_now())
    return details


def _enter(record: Record, execution: str, state: RunState, error: RunError | None) -> Record:
    if record.execution != execution or record.state is state:
        return record
    moved = record.entered(state, utc_now())
    return moved.model_copy(update={"error": error, "callback_url": None}) if state.is_terminal else moved
