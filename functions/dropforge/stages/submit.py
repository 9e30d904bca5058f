"""Stage `submit`: one spec event, however often delivered, becomes one run and one execution.

An invalid spec is a result, not a fault: the run is recorded as REJECTED and people are told. Only what a later
delivery can mend is raised.
"""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

from pydantic import JsonValue

from dropforge.base import names
from dropforge.base.errors import InvalidSpec, RetryLater, SpecProblem
from dropforge.base.log import log
from dropforge.base.redact import redact
from dropforge.base.settings import settings
from dropforge.cloud import clients
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.executions import find_execution, start_execution
from dropforge.run.record import Record, RunState, Transition, utc_now
from dropforge.run.store import RunStore, open_store
from dropforge.spec import MAX_SPEC_BYTES, JobSpec, parse_spec

from . import admission, notify
from .cancel import cancel, tell_unstarted, was_cancelled

# A first delivery that has made the record starts the execution within this; a second one waits that long.
START_SECONDS = 5
_URI = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]/[^\x00-\x1f\ud800-\udfff]{1,1024}")


def submit_object(bucket: str, name: str, generation: str, size: int) -> Record:
    """Submit one generation of an object of the specs bucket. Raises RetryLater and client errors."""
    run = names.run_id_of_object(bucket, name, generation)
    source = f"gs://{bucket}/{name}#{generation}"
    store = open_store()
    if found := store.find(run):
        return resume(store, found)
    try:
        data = read_spec(bucket, name, generation, size)
    except InvalidSpec as error:
        if was_cancelled(store, run):
            return _cancel_unread(store, run, source)
        return _reject(store, run, source, error.problems, b"")
    return _submit(store, run, source, data)


def submit_message(data: bytes, idempotency_key: str) -> Record:
    """Submit the spec that a request message holds. Raises RetryLater and client errors."""
    run = names.run_id_of_message(idempotency_key)
    store = open_store()
    if found := store.find(run):
        return resume(store, found)
    return _submit(store, run, f"message {idempotency_key}", data)


def submit_uri(uri: str, idempotency_key: str) -> Record:
    """Submit the spec at a gs:// URI, in the run of the message that named it."""
    run = names.run_id_of_message(idempotency_key)
    store = open_store()
    if found := store.find(run):
        return resume(store, found)
    if not _URI.fullmatch(uri):
        problem = SpecProblem("/spec_uri", "not a gs:// URI", redact(repr(uri))[:120], "gs://bucket/path")
        return _reject(store, run, f"message {idempotency_key}", [problem], b"")
    try:
        data = _read_uri(uri)
    except InvalidSpec as error:
        return _reject(store, run, uri, error.problems, b"")
    return _submit(store, run, uri, data)


def accept_again(run: str) -> Record:
    """Make the record of a run whose spec was accepted and kept, by somebody who died of it."""
    store = open_store()
    source = store.read(names.open_object(run)).data.decode()
    return _submit(store, run, source, store.read(names.spec_object(run)).data)


def read_spec(bucket: str, name: str, generation: str | None, size: int) -> bytes:
    """The bytes of a spec object. Raises InvalidSpec when it is too large, or not there any more."""
    from google.api_core.exceptions import NotFound

    if size > MAX_SPEC_BYTES:
        raise InvalidSpec(
            [SpecProblem("", "the spec is too large", f"{size} bytes", f"at most {MAX_SPEC_BYTES} bytes")]
        )
    blob = clients.storage().bucket(bucket).blob(name, generation=int(generation) if generation else None)
    try:
        return bytes(blob.download_as_bytes(timeout=TIMEOUT_SECONDS))
    except NotFound:
        expected = "an object that stays until its run is accepted"
        problem = SpecProblem(
            "", "the spec was deleted or overwritten before it was read", f"gs://{bucket}/{name}", expected
        )
        raise InvalidSpec([problem]) from None


def _read_uri(uri: str) -> bytes:
    from google.api_core.exceptions import BadRequest, Forbidden

    bucket, _, name = uri.removeprefix("gs://").partition("/")
    try:
        blob = clients.storage().bucket(bucket).get_blob(name, timeout=TIMEOUT_SECONDS)
    except (BadRequest, Forbidden) as error:  # for good: raised, the message would come again for a day
        problem = SpecProblem("/spec_uri", "the object may not be read", uri, error.message[:300])
        raise InvalidSpec([problem]) from None
    if blob is None:
        raise InvalidSpec([SpecProblem("/spec_uri", "the object does not exist", uri, "a job spec")])
    return read_spec(bucket, name, str(blob.generation), int(blob.size or 0))


def _submit(store: RunStore, run: str, source: str, data: bytes) -> Record:
    try:
        spec = parse_spec(data)
        admission.check(spec, settings())
    except InvalidSpec as error:
        return _reject(store, run, source, error.problems, data)
    if not store.put_new(names.spec_object(run), spec.model_dump_json(by_alias=True).encode()):
        spec = store.spec(run)  # of another delivery, perhaps of another spec under the same key: the first one counts
    now = utc_now()
    record = Record(
        run=run,
        name=spec.name,
        source=redact(source),
        state=RunState.ACCEPTED,
        created=now,
        history=[Transition(state=RunState.ACCEPTED, time=now)],
    )
    if not store.create(record):
        return resume(store, store.record(run))
    log("accepted", stage="submit", run=run, source=source)
    return _begin(store, record, spec, None)


def resume(store: RunStore, record: Record) -> Record:
    """A run that exists: nothing to do, unless whoever made it died before its execution was started."""
    if record.execution or record.state is not RunState.ACCEPTED:
        if record.state is RunState.REJECTED:
            notify.tell(record)  # the first delivery may have died before it told anybody; the event id is the same
        tell_unstarted(store, record)
        return record
    if utc_now() - record.created < timedelta(seconds=START_SECONDS):
        raise RetryLater(f"run {record.run} is being submitted by another delivery; it is looked at again")
    execution = find_execution(record.run, record.created, settings())
    return _begin(store, record, store.spec(record.run), execution)


def _begin(store: RunStore, record: Record, spec: JobSpec, execution: str | None) -> Record:
    """Tell that a run is accepted, and start its execution unless it has one; whoever dies here is followed up.

    In that order: a run whose execution has begun is not looked at again, and nobody would tell of it.
    """
    if was_cancelled(store, record.run):
        cancel(record.run)
        return store.record(record.run)
    notify.tell(record, spec)
    return note_execution(store, record, execution or start_execution(record.run, settings()))


def note_execution(store: RunStore, record: Record, execution: str) -> Record:
    """Note the execution; the first one noted owns the run, and `provision` turns any other away."""

    return store.update(record.run, lambda found: found.claimed(execution))


def _cancel_unread(store: RunStore, run: str, source: str) -> Record:
    """The run of a spec that was deleted, or cancelled, before it could be read: it has ended before it began."""
    now = utc_now()
    history = [Transition(state=RunState.CANCELLED, time=now)]
    record = Record(
        run=run, name="", source=redact(source), state=RunState.CANCELLED, created=now, history=history
    ).model_copy(update={"cancel_requested": now})
    if not store.create(record):
        return resume(store, store.record(run))
    log("cancelled before it was read", stage="submit", run=run, source=source)
    tell_unstarted(store, record)
    return record


def _reject(store: RunStore, run: str, source: str, problems: list[SpecProblem], data: bytes) -> Record:
    if found := store.find(run):
        return resume(store, found)  # another delivery has accepted what this one could not read any more
    now = utc_now()
    source = redact(source)
    listed: list[dict[str, JsonValue]] = [
        {field: text and redact(text) for field, text in problem._asdict().items()} for problem in problems
    ]
    record = Record(
        run=run,
        name=_name(data),
        source=source,
        state=RunState.REJECTED,
        created=now,
        history=[Transition(state=RunState.REJECTED, time=now)],
        problems=listed,
    )
    errors = {"run": run, "source": source, "errors": listed}
    store.put_new(names.errors_object(run), json.dumps(errors, indent=2, ensure_ascii=False).encode())
    if not store.create(record):
        return resume(store, store.record(run))
    log("rejected", stage="submit", run=run, source=source, severity="WARNING", problems=[str(p) for p in problems])
    notify.tell(record)
    return record


def _name(data: bytes) -> str:
    """The name that a rejected spec gives itself, if it can be read."""
    try:
        document: Any = json.loads(data)
        return redact(str(document["name"]))[:63]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
