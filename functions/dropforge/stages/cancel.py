"""Stage `cancel`: store the request to end a run before any function acts on it. Every later step obeys the request.

In the record, the request overrides provisioning, waiting, another attempt, deploying, and a teardown that would keep
the endpoint. A run without an execution ends at once. If the request arrives before the spec, it is kept beside the
future record, and stage `submit` reads it there.

A message cancels only runs that were requested through the same topic, unless it comes from an operator or the console.
Whoever may delete a spec may cancel its run.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import requests

from dropforge.base import names
from dropforge.base.errors import NotFound, RetryLater
from dropforge.base.redact import cut
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.executions import wake
from dropforge.context import Context
from dropforge.deletion import end_endpoint
from dropforge.run.events import Request
from dropforge.run.record import Notice, Record, RunState
from dropforge.tell.everybody import is_unstarted, tell_unstarted, warn
from dropforge.tell.run_events import answer_unknown

from .places import leave


def cancel_requested(context: Context, run: str, request: Request) -> None:
    """Cancel the run that a message names, if the message comes from the run's own topic or from an operator.

    The answer for an unknown run and for the run of another source is the same run event: publishers learn nothing
    about the runs of other sources. Raises RetryLater as `cancel` does, and CloudError if the event could not be
    published.
    """
    if not names.is_run_id(run):
        context.log("not a run id", stage="submit", run=cut(run, 100), severity="WARNING")
    elif context.settings.reaches_all(request.topic):
        cancel(context, run, request)
    else:
        cancel(context, run, request, request.topic)


def cancel(context: Context, run: str, request: Request | None = None, topic: str = "") -> None:
    """Request the end of a run, or of a run of this topic only. Raises RetryLater until a finished run's endpoint is
    verified as deleted. If there is no such run, a run event answers the request.
    """
    by = request.by if request else ""
    record = _request(context, run, topic, by)
    if record is None:
        context.log("no such run, or not yet", stage="submit", run=run, topic=topic, severity="WARNING")
        if request is not None:
            answer_unknown(context, run, request)
        return
    context.log("cancel requested", stage="submit", run=run, state=record.state)
    if is_unstarted(record):
        leave(context, record)
        tell_unstarted(context, record)
    elif record.state.is_terminal:
        if record.endpoint and not record.endpoint.ended and not end_endpoint(context, run):
            raise RetryLater(f"the endpoint of run {run} is being deleted")
    elif record.callback_url:
        _wake(context, record)


def cancel_deleted(context: Context, bucket: str, name: str, generation: str) -> None:
    """Cancel the run of a deleted spec object, unless the run has ended or the object was overwritten.

    Users may delete specs of finished runs: the endpoint of a finished run stays. Cloud Storage reports a replaced
    object as deleted, too. Where the same spec was uploaded again, its object stands for the run that both have.
    """
    run = names.run_id_of_object(bucket, name, generation)
    blob = context.cloud.clients.storage().bucket(bucket).get_blob(name, timeout=TIMEOUT_SECONDS)
    if blob is not None:
        context.log("the spec was overwritten", stage="submit", run=run, by=str(blob.generation))
        return
    record = context.store.find(run)
    if record is not None and record.state.is_terminal and not is_unstarted(record):
        context.log("the spec of a finished run was deleted", stage="submit", run=run, state=record.state)
        return
    cancel(context, run)


def _request(context: Context, run: str, topic: str, by: str) -> Record | None:
    """Set the request in the record, or beside it until a record exists; the record, or None if no such run exists.

    `submit` looks for the object beside the record after it has written the record, and this function tries the record
    again after it has written the object: at least one of them sees the other.
    """
    store = context.store
    try:
        record = store.update(run, lambda latest: _with_request(latest, topic, context.now(), by))
    except NotFound:
        requested = json.dumps({"cancel_requested": context.now().isoformat()}).encode()
        store.put_new(names.cancel_object(run, topic), requested)
        try:
            record = store.update(run, lambda latest: _with_request(latest, topic, context.now(), by))
        except NotFound:
            return None
    return record if _is_reached(record, topic) else None


def _is_reached(record: Record, topic: str) -> bool:
    """Whether a request reaches a run: a request of a topic reaches the runs of that topic, any other every run."""
    return topic in ("", record.topic)


def _with_request(record: Record, topic: str, now: datetime, by: str) -> Record:
    if not _is_reached(record, topic):
        return record
    if record.state.is_terminal:
        if record.endpoint is None or record.endpoint.ended or record.endpoint.expires <= now:
            return record
        # The endpoint expires now: the sweep deletes it even if this request fails.
        expired = record.endpoint.model_copy(update={"expires": now})
        return record.model_copy(update={"endpoint": expired, "cancel_requested": now, "cancelled_by": by})
    if record.cancel_requested:
        return record
    requested = record.model_copy(update={"cancel_requested": now, "cancelled_by": by})
    return requested.entered(RunState.CANCELLED, now) if record.state is RunState.ACCEPTED else requested


def _wake(context: Context, record: Record) -> None:
    """Best effort: if this fails, the run sees the request at its next look."""
    try:
        wake(context.cloud, str(record.callback_url), {"type": "cancel"})
    except requests.RequestException as error:
        problem = type(error).__name__
        context.log("the execution could not be woken", stage="submit", run=record.run, problem=problem)
