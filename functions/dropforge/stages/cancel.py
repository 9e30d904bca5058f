"""Stage `cancel`: store the request to end a run before any function acts on it. Every later step obeys the request.

In the record, the request overrides provisioning, waiting, another attempt, deploying, and a teardown that would keep
the endpoint. A run without an execution ends at once. If the request arrives before the spec, it is kept beside the
future record, and stage `submit` reads it there. The record says who or what requested the end.

A message cancels only runs that were requested through the same topic, unless it comes from an operator or the console.
Whoever may delete a spec may cancel its run.
"""

from __future__ import annotations

import difflib
from datetime import datetime, timedelta

import requests

from dropforge.base import names
from dropforge.base.changes import evolve
from dropforge.base.errors import CloudError, ErrorClass, NotFound, RetryLater
from dropforge.base.redact import cut, redact
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.executions import wake
from dropforge.context import Context
from dropforge.run.events import Request
from dropforge.run.record import Cause, Record, RunState
from dropforge.stages.deletion import end_endpoint
from dropforge.tell.everybody import is_unstarted, tell_unstarted
from dropforge.tell.run_events import answer_unknown

from .places import leave

MOST_CANDIDATES = 100  # open runs that a wrong id is compared with: the newest
MOST_NEAR = 5  # ids in an answer
LIKENESS = 0.8  # of difflib's ratio: an id with two wrong characters
MOVED_WITHIN = timedelta(minutes=10)  # a move copies the object and then deletes it
MOST_SPECS = 2000  # objects of the specs bucket among which the copy is looked for, in two requests


def cancel_requested(context: Context, run: object, request: Request) -> None:
    """Cancel the run that a message names, if the message comes from the run's own topic or from an operator.

    Anything else is answered by a run event with the ids of open runs that may be meant. The answer for an unknown run
    and for the run of another source is the same: publishers learn nothing about the runs of other sources. Raises
    RetryLater as `cancel` does, and CloudError if the event could not be published.
    """
    topic = "" if context.settings.reaches_all(request.topic) else request.topic
    wanted = run.strip() if isinstance(run, str) else ""
    if names.is_run_id(wanted):
        cancel(context, wanted, request, topic)
        return
    found = cut(redact(ascii(run)), 100)
    context.log("not a run id", stage="submit", run=found, severity="WARNING")
    text = f"cancel is {found}; expected the id of a run, such as my-job-0123456789ab. Nothing was cancelled"
    _answer(context, names.run_id_of_message(request.message, request.topic), wanted, topic, request, text)


def cancel(
    context: Context, run: str, request: Request | None = None, topic: str = "", cause: Cause | None = None
) -> None:
    """Request the end of a run, or of a run of this topic only. Raises RetryLater until a finished run's endpoint is
    verified as deleted. If there is no such run, a run event answers the request.
    """
    if request is not None:
        cause = Cause(request.who, request.by)
    record = _request(context, run, topic, cause or Cause())
    if record is None:
        context.log("no such run, or not yet", stage="submit", run=run, topic=topic, severity="WARNING")
        if request is not None:
            later = "a run that is requested there later is cancelled"
            text = f"no run with this id was requested on topic {request.topic}; {later}"
            _answer(context, run, run, topic, request, text)
        return
    run = record.run  # the id of a repeated request leads to the run that it joined
    context.log("cancel requested", stage="submit", run=run, state=record.state)
    if is_unstarted(record):
        leave(context, record)
        tell_unstarted(context, record)
    elif record.state.is_terminal:
        if record.endpoint and not record.endpoint.ended and not end_endpoint(context, run):
            raise RetryLater(f"the endpoint of run {run} is being deleted")
    elif record.callback_url:
        _wake(context, record)


def cancel_deleted(context: Context, bucket: str, name: str, generation: str, md5: str = "") -> None:
    """Cancel the run of a deleted spec object, unless the run has ended or the object was overwritten.

    Users may delete specs of finished runs: the endpoint of a finished run stays. Cloud Storage reports a replaced
    object as deleted, too. Where the same spec was uploaded again, its object stands for the run that both have. `md5`
    is the digest of the object's bytes, in base64, if the event has it.
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
    uri, copy = f"gs://{bucket}/{name}", _copy_of(context, bucket, name, md5) if md5 else ""
    text = f"the deletion of {uri}, of which {copy} is a copy" if copy else f"the deletion of {uri}"
    cancel(context, run, cause=Cause(redact(text)))


def _copy_of(context: Context, bucket: str, name: str, md5: str) -> str:
    """A fresh object with the same bytes, which a move makes; "" if there is none."""
    fields = "items(name,md5Hash,timeCreated),nextPageToken"
    blobs = context.cloud.clients.storage().list_blobs(
        bucket, fields=fields, max_results=MOST_SPECS, timeout=TIMEOUT_SECONDS
    )
    fresh = context.now() - MOVED_WITHIN
    same = (blob for blob in blobs if blob.md5_hash == md5 and blob.name != name and blob.time_created > fresh)
    copy = max(same, key=lambda blob: blob.time_created, default=None)
    return f"gs://{bucket}/{copy.name}" if copy is not None else ""


def _answer(context: Context, subject: str, wanted: str, topic: str, request: Request, text: str) -> None:
    """Answer a request that ends no run. Raises CloudError."""
    near = _near(context, wanted, topic)
    if problem := answer_unknown(context, subject, request, text, near):
        raise CloudError(ErrorClass.TRANSIENT, problem)


def _near(context: Context, wanted: str, topic: str) -> list[str]:
    """The open runs of a topic ("": of every source) that a wrong id may mean: by name, by its beginning, or alike."""
    marks = context.store.marks().runs
    newest = sorted(marks, key=lambda run: marks[run], reverse=True)[:MOST_CANDIDATES]
    records = [record for run in newest if (record := context.store.recall(run)) and _is_reached(record, topic)]
    named = [record.run for record in records if record.name == wanted or record.run.startswith(wanted)]
    alike = difflib.get_close_matches(wanted, [record.run for record in records], MOST_NEAR, LIKENESS)
    return (named or alike)[:MOST_NEAR]


def _request(context: Context, run: str, topic: str, cause: Cause) -> Record | None:
    """Set the request in the record, or beside it until a record exists; the record, or None if no such run exists.

    `submit` looks for the object beside the record after it has written the record, and this function tries the record
    again after it has written the object: at least one of them sees the other.
    """
    store = context.store
    try:
        record = store.update(run, lambda latest: _with_request(latest, topic, context.now(), cause))
    except NotFound:
        store.keep_cancel(run, topic, cause)
        try:
            record = store.update(run, lambda latest: _with_request(latest, topic, context.now(), cause))
        except NotFound:
            return None
    return record if _is_reached(record, topic) else None


def _is_reached(record: Record, topic: str) -> bool:
    """Whether a request reaches a run: a request of a topic reaches the runs of that topic, any other every run."""
    return topic in ("", record.topic)


def _with_request(record: Record, topic: str, now: datetime, cause: Cause) -> Record:
    if not _is_reached(record, topic):
        return record
    asked = {"cancel_requested": now, "cancelled_by": cause.person, "cancel_cause": cause.text}
    if record.state.is_terminal:
        if record.endpoint is None or record.endpoint.ended or record.endpoint.expires <= now:
            return record
        # The endpoint expires now: the sweep deletes it even if this request fails.
        expired = evolve(record.endpoint, expires=now)
        return evolve(record, endpoint=expired, **asked)
    if record.cancel_requested:
        return record
    requested = evolve(record, **asked)
    return requested.entered(RunState.CANCELLED, now) if record.state is RunState.ACCEPTED else requested


def _wake(context: Context, record: Record) -> None:
    """Best effort: if this fails, the run sees the request at its next look."""
    try:
        wake(context.cloud, str(record.callback_url), {"type": "cancel"})
    except requests.RequestException as error:
        problem = type(error).__name__
        context.log("the execution could not be woken", stage="submit", run=record.run, problem=problem)
