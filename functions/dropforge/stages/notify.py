"""Stage `notify`: enter a state, tell other systems (run event) and people (Slack).

The state is written first; a message may therefore be sent twice, with the same event id, but never for a state that
was not reached.
"""

from __future__ import annotations

import json
import threading
from datetime import datetime
from functools import lru_cache
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, Conflict, ErrorClass
from dropforge.base.log import log
from dropforge.base.settings import settings
from dropforge.cloud import clients
from dropforge.cloud.classify import client_errors
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.money import Notice, running_since
from dropforge.run.events import RunEvent, run_event_message
from dropforge.run.record import Record, RunError, RunState, Transition, utc_now
from dropforge.run.store import RunStore, open_store
from dropforge.spec import JobSpec
from dropforge.tell.slack import Message, notice_message, send, slack_message

from .answers import superseded

PUBLISH_TIMEOUT_SECONDS = 20


def notify(run: str, execution: str, state: RunState, error: RunError | None) -> dict[str, Any]:
    """Enter `state` and tell everybody. Raises NotFound for an unknown run.

    Answers {"status": "NOTIFIED" | "UNTOLD" | "CANCELLED" | "SUPERSEDED", "state": ...}. UNTOLD: the state is entered,
    but not everybody could be told: call again. CANCELLED: no success is written, because somebody has asked for the
    run's end since teardown looked: tear down what was kept, and call again with that state.
    """
    store = open_store()
    try:
        record = store.update(run, lambda found: _enter(found, execution, state, error))
    except Conflict as conflict:
        log(str(conflict), stage="notify", run=run, severity="WARNING")
        return superseded(store.record(run))
    if _cancel_wins(record, execution, state):
        return {"status": "CANCELLED", "state": record.state}
    if record.execution != execution or record.state is not state:
        return superseded(record)
    spec = store.spec(run)
    try:
        if state.is_terminal:
            conclude(store, record, spec)
        else:
            tell(record, spec)
    except CloudError:
        return {"status": "UNTOLD", "state": record.state}
    log(state.lower(), stage="notify", run=run)
    return {"status": "NOTIFIED", "state": record.state}


def conclude(store: RunStore, record: Record, spec: JobSpec) -> None:
    """Write the report of a run that is over, and tell everybody. Raises CloudError when trying again may help."""
    store.put_new(names.report_object(record.run), json.dumps(report(record, spec), indent=2).encode())
    tell(record, spec)


def report(record: Record, spec: JobSpec) -> dict[str, Any]:
    """What became of a run, for report.json: one page for people and scripts that come later."""
    kept = record.model_dump(mode="json", include={"run", "name", "source", "state", "created", "attempts", "metrics"})
    return {
        **kept,
        "ended": record.history[-1].time.isoformat(),
        "seconds_per_stage": record.stage_seconds(utc_now()),
        "cost_usd": cost(record, utc_now()),
        "endpoint": record.endpoint.model_dump(mode="json") if record.endpoint else None,
        "error": record.error.model_dump(mode="json") if record.error else None,
        "spec": spec.model_dump(mode="json", by_alias=True),
    }


def cost(record: Record, now: datetime) -> dict[str, Any]:
    """What a run has cost by part, and what it may still cost; null where a price is unknown.

    `endpoint_at_most` is what it has cost so far if all its instances ran all the time, `endpoint_until_it_expires`
    what that comes to.
    """
    lasts = record.endpoint.expires if record.endpoint and not record.endpoint.ended else now
    return {
        "attempts": [None if (usd := a.cost(now)) is None else round(usd, 6) for a in record.attempts],
        "training": record.training_cost(now),
        "endpoint_at_most": record.serving_cost(now),
        "endpoint_until_it_expires": record.serving_cost(lasts),
        "total_at_most": record.cost(lasts),
    }


def tell(record: Record, spec: JobSpec | None = None) -> None:
    """Publish the record's present state as a run event and, when people care about it, to Slack.

    Raises CloudError when a terminal state could not be told and trying again may help.
    """
    announce(record, record.state)
    tell_people(record, spec)


def warn(store: RunStore, record: Record, spec: JobSpec, notice: Notice) -> Record:
    """Tell everybody a notice, once: a second telling, after a death before it was noted, has the same event id."""
    if notice.key in record.notices:
        return record
    # No WARNING: those of this stage are ends that cannot be told (alert run_stuck).
    log(notice.text, stage="notify", run=record.run, severity="NOTICE", notice=notice.key)
    event = RunEvent(
        id=f"{record.run}/notice/{notice.key}",
        run=record.run,
        state=record.state,
        time=utc_now(),
        name=record.name,
        notice=notice.key,
        details={"text": notice.text, "cost_usd": record.cost(utc_now())},
    )
    untold = _publish(event)
    _, may_pass = _send(notice_message(record, notice), record, spec)
    if untold or may_pass:
        return record  # told again at the next look
    return store.update(record.run, lambda found: found.with_notice(notice.key))


def tell_people(record: Record, spec: JobSpec | None = None) -> None:
    """Send the Slack message for the record's present state.

    Raises CloudError (TRANSIENT) when a terminal state could not be told and trying again may help; nobody should
    wait for Slack in the middle of a run.
    """
    problem, may_pass = _send(slack_message(record, spec, settings(), utc_now()), record, spec)
    if problem and may_pass and record.state.is_terminal:
        raise CloudError(ErrorClass.TRANSIENT, problem)


def _send(message: Message | None, record: Record, spec: JobSpec | None) -> tuple[str, bool]:
    """Send a message where the spec, or the deployment, says. Answers as `slack.send` does."""
    secret = spec.notify.slack.webhook_secret if spec and spec.notify.slack else settings().slack_webhook_secret
    if message is None or not secret:
        return "", False
    problem, may_pass = send(secret, message, settings())
    if problem:
        log(problem, stage="notify", run=record.run, severity="ERROR")
    return problem, may_pass


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
    problem = _publish(event)
    if problem and state.is_terminal:
        raise CloudError(ErrorClass.TRANSIENT, problem)


def _publish(event: RunEvent) -> str:
    """Publish a run event; what went wrong, if anything did."""
    data, attributes = run_event_message(event)
    topic = settings().topic(settings().run_events_topic)
    failures: tuple[type[Exception], ...] = (*client_errors(), TimeoutError)
    publisher = clients.publisher()
    published = _published(publisher, event.id)
    if published.is_set():
        return ""
    try:
        publisher.publish(topic, data, timeout=TIMEOUT_SECONDS, **attributes).result(PUBLISH_TIMEOUT_SECONDS)
        published.set()
    except failures as error:
        problem = f"the run event {event.id} could not be published: {error or type(error).__name__}"
        log(problem, stage="notify", run=event.run, severity="ERROR")
        return problem
    return ""


@lru_cache(maxsize=1024)
def _published(publisher: Any, event_id: str) -> threading.Event:
    """Whether this process has published an event: a stage says again where it is at each call, every few seconds for
    as long as it waits."""
    return threading.Event()


def _details(record: Record, entered: Transition) -> dict[str, Any]:
    details: dict[str, Any] = {"source": record.source}
    if entered.attempt:
        details["attempt"] = entered.attempt
    if entered.state.is_terminal:
        details["metrics"] = record.metrics
        details["error"] = record.error.model_dump(mode="json") if record.error else None
        details["problems"] = record.problems
        details["endpoint"] = record.endpoint.model_dump(mode="json") if record.endpoint else None
        details["cost_usd"] = cost(record, utc_now())
    return details


def _enter(record: Record, execution: str, state: RunState, error: RunError | None) -> Record:
    if record.execution != execution or record.state is state or _cancel_wins(record, execution, state):
        return record
    now = utc_now()
    moved = record.entered(state, now)
    if state is RunState.TRAINING:
        return moved.with_running(record.attempt, running_since(record.attempts[-1], now, settings()))
    return moved.model_copy(update={"error": error, "callback_url": None}) if state.is_terminal else moved


def _cancel_wins(record: Record, execution: str, state: RunState) -> bool:
    """Whether somebody has asked for the end of a run that is about to have succeeded."""
    asked = record.cancel_requested is not None and not record.state.is_terminal
    return asked and record.execution == execution and state is RunState.SUCCEEDED
