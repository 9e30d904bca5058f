"""Stage `cancel`: keep the request to end a run before anybody acts on it. Every later step obeys the request.

In the record, the request overrides provisioning, waiting, another attempt, deploying, and a teardown that would keep
the endpoint. A run without an execution ends at once. If the request arrives before the spec, it is kept beside the
future record, and stage `submit` reads it there.
"""

from __future__ import annotations

import json
from datetime import datetime

import requests

from dropforge.base import names
from dropforge.base.errors import NotFound, RetryLater
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.executions import wake
from dropforge.context import Context
from dropforge.deletion import end_endpoint
from dropforge.run.record import Record, RunState
from dropforge.tell.everybody import is_unstarted, tell_unstarted


def cancel(context: Context, run: str) -> None:
    """Request the end of a run. Raises RetryLater until a finished run's endpoint is verified as deleted."""
    if not names.is_run_id(run):
        context.log("not a run id", stage="submit", run=run[:100], severity="WARNING")
        return
    record = _request(context, run)
    if record is None:
        return
    context.log("cancel requested", stage="submit", run=run, state=record.state)
    if is_unstarted(record):
        tell_unstarted(context, record)
    elif record.state.is_terminal:
        if record.endpoint and not record.endpoint.ended and not end_endpoint(context, run):
            raise RetryLater(f"the endpoint of run {run} is being deleted")
    elif record.callback_url:
        _wake(context, record)


def cancel_deleted(context: Context, bucket: str, name: str, generation: str) -> None:
    """Cancel the run of a deleted spec object, unless the run has ended or the object was overwritten.

    Users may tidy up the inbox: the endpoint of a finished run stays. An upload under the same name is another run, and
    Cloud Storage reports the replaced object as deleted.
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


def _request(context: Context, run: str) -> Record | None:
    """Set the request in the record, or in cancel.json until a record exists; the record, or None without a record.

    `submit` reads cancel.json after it has written the record, and this function tries the record again after it has
    written cancel.json: at least one of them sees the other.
    """
    store = context.store
    try:
        return store.update(run, lambda record: _with_request(record, context.now()))
    except NotFound:
        requested = json.dumps({"cancel_requested": context.now().isoformat()}).encode()
        store.put_new(names.cancel_object(run), requested)
    try:
        return store.update(run, lambda record: _with_request(record, context.now()))
    except NotFound:
        context.log("cancelled before it was submitted", stage="submit", run=run, severity="WARNING")
        return None


def _with_request(record: Record, now: datetime) -> Record:
    if record.state.is_terminal:
        if record.endpoint is None or record.endpoint.ended or record.endpoint.expires <= now:
            return record
        # The endpoint expires now: the sweep deletes it even if this request fails.
        expired = record.endpoint.model_copy(update={"expires": now})
        return record.model_copy(update={"endpoint": expired, "cancel_requested": now})
    if record.cancel_requested:
        return record
    requested = record.model_copy(update={"cancel_requested": now})
    return requested.entered(RunState.CANCELLED, now) if record.state is RunState.ACCEPTED else requested


def _wake(context: Context, record: Record) -> None:
    """Best effort: without it, the run sees the request at its next look."""
    try:
        wake(context.cloud, str(record.callback_url), {"type": "cancel"})
    except requests.RequestException as error:
        problem = type(error).__name__
        context.log("the execution could not be woken", stage="submit", run=record.run, problem=problem)
