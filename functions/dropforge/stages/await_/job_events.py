"""Job events on their way in: stored once each beside the run, and the waiting execution is woken."""

from __future__ import annotations

import requests
from pydantic import ValidationError

from dropforge.base import names
from dropforge.base.errors import RetryLater
from dropforge.base.log import log
from dropforge.cloud.executions import wake
from dropforge.run.events import JobEvent, parse_job_event
from dropforge.run.store import open_store

# The events that change what the workflow does next. Progress and checkpoints are only kept.
WAKING = frozenset({"started", "succeeded", "failed", "preempted"})


def receive_job_event(data: bytes) -> None:
    """Keep a job event and wake its run. Raises RetryLater when the execution could not be reached.

    Malformed, late and forged events change nothing: they are logged and done with.
    """
    try:
        event = parse_job_event(data)
    except ValidationError as error:
        log("malformed job event", stage="await", severity="WARNING", problem=str(error)[:500])
        return
    store = open_store()
    record = store.find(event.run)
    if record is None or record.state.is_terminal or event.attempt != record.attempt:
        log("job event of no running attempt", stage="await", run=event.run, severity="WARNING", type=event.type)
        return
    store.put_new(names.event_object(event.run, event.attempt, event.sequence, event.type), data)
    if event.type not in WAKING:
        return
    # Read after the event is kept: `inspect` notes its callback before it looks for events, so one sees the other.
    record = store.record(event.run)
    if record.callback_url:
        _wake(record.callback_url, event)


def _wake(callback_url: str, event: JobEvent) -> None:
    """A second delivery wakes again: the first may have died between keeping the event and waking the run."""
    try:
        if wake(callback_url, {"type": event.type, "attempt": event.attempt, "sequence": event.sequence}):
            return
    except requests.RequestException as error:
        raise RetryLater(f"the callback of run {event.run} could not be reached: {type(error).__name__}") from error
    raise RetryLater(f"the callback of run {event.run} did not take the event")
