"""Run events: publishes state changes and notices for other systems."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from pydantic import JsonValue

from dropforge.base.changes import evolve
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.settings import Settings
from dropforge.cloud.classify import client_errors
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.context import Context
from dropforge.run.events import Request, RunEvent, run_event_message
from dropforge.run.record import Notice, Record, RunState, Transition

from .facts import actions_of, link_of, title_of, what_of
from .report import cost

PUBLISH_TIMEOUT_SECONDS = 20
UNKNOWN = "UNKNOWN"  # the state in the answer to a request about no run


def announce(context: Context, record: Record, state: RunState) -> None:
    """Publish a run event for `state`, which the record has entered. A repeated event has the same id.

    The request for an end also has the event for TEARING_DOWN, which a short teardown leaves to its end. Raises
    CloudError for a terminal state only: a failed event must delay neither the training nor its teardown.
    """
    is_torn_down = state.is_terminal and any(t.state is RunState.TEARING_DOWN for t in record.history)
    states = [RunState.TEARING_DOWN, state] if is_torn_down else [state]
    problem = publish(context, *(state_event(record, each, context.settings, context.now()) for each in states))
    if problem and state.is_terminal:
        raise CloudError(ErrorClass.TRANSIENT, problem)


def announce_notice(context: Context, record: Record, notice: Notice) -> bool:
    """Publish a run event for a notice; whether it was published."""
    return not publish(context, notice_event(record, notice, context.settings, context.now()))


def state_event(record: Record, state: RunState, settings: Settings, now: datetime) -> RunEvent:
    """The run event for a state that the record has entered."""
    entered = next(t for t in reversed(record.history) if t.state is state)
    return RunEvent(
        id=f"{record.run}/{entered.attempt}/{state.lower()}",
        run=record.run,
        state=state,
        time=entered.time,
        name=record.name,
        title=title_of(record, what_of(record, state)),
        actions=actions_of(record, state, now),
        link=link_of(record, settings),
        details=_details(record, entered, now),
    )


def notice_event(record: Record, notice: Notice, settings: Settings, now: datetime) -> RunEvent:
    """The run event for a notice."""
    return RunEvent(
        id=f"{record.run}/notice/{notice.key}",
        run=record.run,
        state=record.state,
        time=now,
        name=record.name,
        notice=notice.key,
        title=title_of(record, notice.headline),
        actions=notice.actions or actions_of(record, record.state, now),
        link=link_of(record, settings),
        details={"text": notice.text, "cost_usd": cost(record, now)},
    )


def answer_unknown(context: Context, subject: str, request: Request, text: str, near: list[str]) -> str:
    """Answer a cancel request that ends no run. Returns the problem, or "". `near`: the runs that may be meant."""
    meant = f"; perhaps one of these open runs is meant: {', '.join(near)}" if near else ""
    return publish(context, _answer(context, subject, "cancel", request, text=text + meant, near=[*near]))


def answer_refused(context: Context, rollout: str, request: Request, text: str, hint: str) -> str:
    """Answer a message that would change a named endpoint and changed nothing. Returns the problem, or ""."""
    return publish(context, _answer(context, rollout, "refused", request, text=text, hint=hint))


def _answer(context: Context, subject: str, kind: str, request: Request, **details: JsonValue) -> RunEvent:
    """The event that answers a message about a run or a rollout."""
    key = f"{kind}-{request.message}"
    return RunEvent(
        id=f"{subject}/notice/{key}",
        run=subject,
        state=UNKNOWN,
        time=context.now(),
        notice=key,
        title=f"{subject}: a request to topic {request.topic} changed nothing",
        details={"topic": request.topic, "message": request.message, **details},
    )


def answer_joined(context: Context, record: Record, notice: Notice, repeat: str, source: str) -> str:
    """Answer a request that joined a run. Returns the problem, or "".

    `repeat` is the id that a run of its own would have; `source` names its object or message.
    """
    mine = notice._replace(key=f"joined-{repeat}")
    event = notice_event(record, mine, context.settings, context.now())
    details = {**event.details, "joined": repeat, "source": source}
    return publish(context, evolve(event, details=details))


def answer_ignored(context: Context, run: str, uri: str, text: str) -> None:
    """Answer the upload of an object that is no spec. `run` would be its run. An event that is lost is only logged."""
    event = RunEvent(
        id=f"{run}/notice/ignored",
        run=run,
        state=UNKNOWN,
        time=context.now(),
        notice="ignored",
        title=text,
        details={"object": uri, "text": text},
    )
    publish(context, event)


def publish(context: Context, *events: RunEvent) -> str:
    """Publish run events in one request, but for those that this process has published.

    Returns the problem of the last event, or "". A stage announces its state at each call, every few seconds while it
    waits: `context.published` avoids the repeats.
    """
    sent = [(event, _sent(context, event)) for event in events if event.id not in context.published]
    problems = {event.id: problem for event, wait in sent if (problem := _outcome(context, event, wait))}
    return problems.get(events[-1].id, "")


def _sent(context: Context, event: RunEvent) -> Callable[[], object]:
    """Hand an event to the publisher; what waits for the answer, and raises if there is none."""
    data, attributes = run_event_message(event)
    topic = context.settings.topic(context.settings.run_events_topic)
    try:
        future = context.cloud.clients.publisher().publish(topic, data, timeout=TIMEOUT_SECONDS, **attributes)
    except client_errors() as error:
        return partial(_raise, error)
    return partial(future.result, PUBLISH_TIMEOUT_SECONDS)


def _outcome(context: Context, event: RunEvent, wait: Callable[[], object]) -> str:
    """Wait until an event is published; the problem, or ""."""
    failures: tuple[type[Exception], ...] = (*client_errors(), TimeoutError)
    try:
        wait()
    except failures as error:
        problem = f"the run event {event.id} could not be published: {error or type(error).__name__}"
        context.log(problem, stage="notify", run=event.run, severity="ERROR")
        return problem
    context.published.add(event.id)
    return ""


def _raise(error: Exception) -> None:
    raise error


def _details(record: Record, entered: Transition, now: datetime) -> dict[str, Any]:
    details: dict[str, Any] = {"source": record.source, "cost_usd": cost(record, now)}
    if record.submitter:
        details["submitter"] = record.submitter
    if record.ended_by:
        details["ended_by"] = record.ended_by
    if entered.attempt:
        details["attempt"] = entered.attempt
    if record.wait_reason:
        details["wait_reason"] = record.wait_reason
    if entered.state.is_terminal:
        details["metrics"] = record.metrics
        details["error"] = record.error.model_dump(mode="json") if record.error else None
        details["problems"] = record.problems
        details["endpoint"] = record.endpoint.model_dump(mode="json") if record.endpoint else None
        details["parity"] = record.parity.state if record.parity else None
    return details
