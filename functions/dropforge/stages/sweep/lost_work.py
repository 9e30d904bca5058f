"""Part of stage `sweep`: work that was lost.

A spec without a run; a run without a live execution; an end that was not announced; an endpoint that was deleted from
outside, that has used up most of its budget, or that has ended.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from dropforge.base import names
from dropforge.base.errors import RetryLater
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.context import Cloud
from dropforge.cloud.executions import LIVE, find_execution, start_execution, state_of
from dropforge.context import Context
from dropforge.money.limits import due_of_budget
from dropforge.platforms.serving import Deployment
from dropforge.platforms.training import NO_KEY, launch_of
from dropforge.run.record import END_TOLD, Record, RunState
from dropforge.stages.deletion import delete_remaining, end_endpoint
from dropforge.stages.ending import finish
from dropforge.stages.submit import accept_again, note_execution, resume, source_of_object, submit_object
from dropforge.tell.everybody import tell, tell_unstarted, warn
from dropforge.tell.notices import ENDPOINT_LOST, endpoint_ended, endpoint_lost

LOST_AFTER = timedelta(seconds=10)  # by then the first delivery has done its part, or has crashed
LOST_FOR = timedelta(days=7)  # an older spec was swept for a week, or was there before the deployment
# A call that read the record before the run's end may write into the ledger after the end. Such a call lasts at most as
# long as a function may (540 s, terraform/functions.tf); until then the run keeps its open mark.
LATE_FOR = timedelta(minutes=15)
# Longer than the sweep submits a spec, and than an event is delivered again: Eventarc repeats it for 24 hours
# (https://cloud.google.com/eventarc/docs/retry-events).
UNACCEPTED_FOR = LOST_FOR + timedelta(days=1)


class Dropped(NamedTuple):
    """A spec object in the specs bucket; a Blob takes several times the memory, and there may be 100,000."""

    name: str
    generation: int
    size: int
    time_created: datetime
    again: str = ""


def specs(cloud: Cloud) -> list[Dropped]:
    """Every spec object in the specs bucket, in the order of the names."""
    fields = "items(name,generation,size,timeCreated,metadata),nextPageToken"
    blobs = cloud.clients.storage().list_blobs(
        cloud.settings.specs_bucket, prefix=names.SPECS_PREFIX, fields=fields, timeout=TIMEOUT_SECONDS
    )
    return [
        Dropped(
            blob.name,
            int(blob.generation),
            int(blob.size or 0),
            blob.time_created,
            (blob.metadata or {}).get(names.AGAIN, ""),
        )
        for blob in blobs
        if names.is_spec_object(blob.name)
    ]


def may_be_lost(blob: Dropped, now: datetime) -> bool:
    """Whether a spec is old enough to have lost its event, and not so old that it was swept before."""
    return LOST_AFTER < now - blob.time_created < LOST_FOR


def submit(context: Context, blob: Dropped, now: datetime) -> str:
    """Submit a spec that should have a run by now; return the run, or "" if there is nothing to do."""
    store, bucket, generation = context.store, context.settings.specs_bucket, str(blob.generation)
    run = names.run_id_of_object(bucket, blob.name, generation)
    if not may_be_lost(blob, now) or store.exists(run) or store.find(run):
        return ""
    message = "a spec that was dropped and has no run"
    context.log(message, stage="sweep", run=run, severity="WARNING", resource=blob.name)
    # No event repeats this submission: the open mark makes the next sweep look at the run until its end was announced.
    source = source_of_object(context, bucket, blob.name, generation)
    store.put_new(names.open_object(run), source.model_dump_json().encode())
    record = submit_object(context, bucket, blob.name, generation, blob.size, blob.again)
    if record.run != run:  # it has joined another run
        store.close(run)
    elif record.state is RunState.REJECTED:
        store.update(run, lambda latest: latest.with_notice(END_TOLD))
    return run


def accept(context: Context, run: str, since: datetime, now: datetime) -> str:
    """Recreate the record of a run with an open mark since `since`; return the run, or "" if there is nothing to do.

    A marked run without a record was not accepted yet. Unless its spec is an object of its own, the event of the spec
    is delivered again, and a spec in the specs bucket is submitted again (`submit`). The mark must outlive that: the
    delivery that accepts the run may find the mark and write only the record.
    """
    if now - since < LOST_AFTER:
        return ""
    if not context.store.has_spec_beside(run):
        if now - since > UNACCEPTED_FOR:
            context.store.close(run)
        return ""
    message = "a run that was to be accepted and has no record"
    context.log(message, stage="sweep", run=run, severity="WARNING")
    accept_again(context, run)
    return run


def restart(context: Context, record: Record, live: frozenset[str]) -> bool:
    """Give an unfinished run a new execution; False if it has a live execution, or gets one elsewhere.

    The ended execution never owns the run again. A crash in here leaves the run without an execution, for the next
    sweep.
    """
    store, run, old = context.store, record.run, record.execution
    # The execution may have started after the live executions were listed.
    if old in live or (old and state_of(context.cloud, old) in LIVE):
        return False
    if old:
        record = store.update(run, lambda latest: latest.released(old))
        if record.execution or record.state.is_terminal:
            return False  # the run has ended meanwhile, or another sweep was faster
    if record.state is RunState.ACCEPTED:
        try:
            return resume(context, record).execution is not None
        except RetryLater:
            return False
    message = "an unfinished run without a live execution"
    context.log(message, stage="sweep", run=run, severity="WARNING", state=record.state)
    execution = find_execution(context.cloud, run, record.created) or start_execution(context.cloud, run)
    note_execution(context, record, execution)
    return True


def settle(
    context: Context, record: Record, listed: frozenset[str], live: frozenset[str] | None, now: datetime
) -> None:
    """Delete a finished run's leftovers except its live endpoint, announce its end, then remove its open mark.

    Warnings about the endpoint's cost, and the endpoint's end, are announced here: no other function looks at a
    finished run. `listed` are the names of all resources in the cloud's lists. `live` is None if the live executions
    are unknown.
    """
    run, is_over = record.run, False
    try:
        if _is_served(record, now) and not _has_lost_endpoint(context, record, listed):
            delete_remaining(context, run, keep_endpoint=True)
            _warn_of_budget(context, record, now)
        elif record.endpoint:
            is_over = end_endpoint(context, run) and _tell_of_endpoint(context, context.store.record(run))
        else:
            is_over = not delete_remaining(context, run)
    finally:
        is_told = live is not None and _tell_end(context, record, live)
    if is_over and is_told and now - record.history[-1].time > LATE_FOR:
        context.store.close(run)


def _is_served(record: Record, now: datetime) -> bool:
    endpoint = record.endpoint
    is_kept = endpoint is not None and endpoint.ended is None and endpoint.expires >= now
    return is_kept and record.state is RunState.SUCCEEDED


def _warn_of_budget(context: Context, record: Record, now: datetime) -> None:
    spec = context.store.spec(record.run)
    for notice in due_of_budget(record, spec, now):
        warn(context, record, spec, notice)


def _has_lost_endpoint(context: Context, record: Record, listed: frozenset[str]) -> bool:
    """Whether an endpoint was deleted from outside. People are told first, and once.

    An incomplete list proves nothing: this function asks the cloud for the endpoint by name and then reads the record
    again, because dropforge may have ended the endpoint itself.
    """
    store = context.store
    parts = [entry.name for entry in store.ledger(record.run).remaining() if entry.is_endpoint(record.run)]
    if parts and listed.issuperset(parts):
        return False
    spec = store.spec(record.run)
    assert spec.serve is not None, "only a run that serves has an endpoint"
    assert record.endpoint is not None, "only a served run gets here"
    launch = launch_of(record, spec, context.settings, key=NO_KEY)
    deployment = Deployment(record.run, spec, context.settings, record.endpoint.expires, launch)
    if context.platforms.server(spec.serve.type).exists(context.cloud, deployment):
        return False
    record = store.record(record.run)
    if record.endpoint is None or not _is_served(record, context.now()):
        return False
    notice = endpoint_lost(record, record.endpoint, context.now())
    # If people were not told, the next sweep finds the endpoint lost again.
    return notice.key in warn(context, record, spec, notice).notices


def _tell_of_endpoint(context: Context, record: Record) -> bool:
    """Tell people once that an endpoint has ended, and why; False if they must be told later."""
    endpoint, spec = record.endpoint, context.store.spec(record.run)
    assert endpoint is not None, "the caller passes only runs with an endpoint"
    assert spec.serve is not None, "only a run that serves has an endpoint"
    if record.state is not RunState.SUCCEEDED or ENDPOINT_LOST in record.notices:
        return True
    reason = f"its ttl of {spec.serve.ttl} is over"
    if record.cancel_requested:
        reason = f"its end was requested by {record.cancel_cause or 'a user'}"
    elif endpoint.limit == "max_cost_usd":
        reason = "the budget is spent"
    notice = endpoint_ended(record, endpoint, reason, context.now())
    return notice.key in warn(context, record, spec, notice).notices


def _tell_end(context: Context, record: Record, live: frozenset[str]) -> bool:
    """Announce an end whose execution crashed before it announced it; False if that is still to be done.

    A repeated event has the same id as the first.
    """
    tell_unstarted(context, record)
    if record.state is RunState.REJECTED and END_TOLD not in record.notices:
        tell(context, record)
        context.store.update(record.run, lambda latest: latest.with_notice(END_TOLD))
    execution = record.execution
    if execution is None or END_TOLD in record.notices:
        return True
    if execution in live or (state := state_of(context.cloud, execution)) in LIVE:
        return False
    if state == "SUCCEEDED":
        return True
    message = "an end that may not have been announced"
    context.log(message, stage="sweep", run=record.run, severity="WARNING", state=record.state)
    if not finish(context, context.store.record(record.run)):
        return False
    context.store.update(record.run, lambda latest: latest.with_notice(END_TOLD))
    return True
