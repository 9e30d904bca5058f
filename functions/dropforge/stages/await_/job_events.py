"""Job events: keep each event once beside the run, then wake the waiting execution."""

from __future__ import annotations

import requests
from pydantic import ValidationError

from dropforge.base import names
from dropforge.base.errors import RetryLater, first_problem
from dropforge.cloud.executions import SETTLED, TAKEN, wake
from dropforge.context import Context
from dropforge.run.events import MAX_JOB_EVENT_BYTES, JobEvent, parse_job_event
from dropforge.run.proof import EVENT_NAME, is_proved
from dropforge.run.record import Record

# Events that change what the workflow does next. Checkpoints are only kept.
WAKING = frozenset({"started", "succeeded", "failed", "preempted"})


def receive_job_event(context: Context, data: bytes, claimed_proof: object) -> None:
    """Keep a job event and wake its run. Raises RetryLater if the execution could not be reached.

    claimed_proof: the attribute `proof` of the message. Malformed, late and forged events change nothing: they are
    logged and acknowledged.
    """
    try:
        if len(data) > MAX_JOB_EVENT_BYTES:
            raise ValueError(f"it has {len(data)} bytes; expected at most {MAX_JOB_EVENT_BYTES}")
        event = parse_job_event(data)
    except ValueError as error:  # a ValidationError is a ValueError
        problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
        context.log("malformed job event", stage="await", severity="WARNING", problem=problem)
        return
    store = context.store
    known = store.recall(event.run)
    if not _is_of(known, event):
        known = store.find(event.run)
    if known is None or not _is_of(known, event):
        message = "job event without a running attempt"
        context.log(message, stage="await", run=event.run, severity="WARNING", type=event.type)
        return
    if not is_proved(store.key(event.run), EVENT_NAME, data, claimed_proof):
        message = "job event without a proof of its run"
        context.log(message, stage="await", run=event.run, severity="WARNING", type=event.type)
        return
    store.put_new(
        names.event_object(event.run, event.attempt, event.sequence, event.type), event.model_dump_json().encode()
    )
    if event.type not in WAKING:
        return
    _wake_run(context, event, known.callback_url)


def _is_of(record: Record | None, event: JobEvent) -> bool:
    """Whether an event is of the latest attempt in a record, which may not be the present one."""
    return record is not None and not record.state.is_terminal and event.attempt == record.attempt


def _wake_run(context: Context, event: JobEvent, known: str | None) -> None:
    """Wake the execution, also on a second delivery: the first may have crashed between keeping and waking.

    All attempts of an execution have one callback, so the one that this process knows costs no request. It may be that
    of an execution that has ended, whose run another execution has taken over: then it takes no request, and the record
    is read. That happens after the event is kept, and `inspect` notes its callback before it reads events: at least one
    of the two functions sees the other.
    """
    status = _wake(context, event, known) if known else None
    if status in TAKEN:
        return
    present = context.store.record(event.run).callback_url
    if present and present != known:
        status = _wake(context, event, present)
    if present and status not in SETTLED:
        raise RetryLater(f"the callback of run {event.run} did not take the event")


def _wake(context: Context, event: JobEvent, callback_url: str) -> int:
    """The status of the answer. Raises RetryLater without an answer."""
    body = {"type": event.type, "attempt": event.attempt, "sequence": event.sequence}
    try:
        return wake(context.cloud, callback_url, body)
    except requests.RequestException as error:
        raise RetryLater(f"the callback of run {event.run} could not be reached: {type(error).__name__}") from error
