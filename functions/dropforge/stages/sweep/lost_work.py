"""Part of stage `sweep`: work that was lost. A spec without a run, a run that no execution goes on with, an end that
nobody was told of, an endpoint that somebody else has deleted, that has used up most of its budget, or has ended."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from dropforge.base import names
from dropforge.base.errors import RetryLater
from dropforge.base.log import log
from dropforge.base.settings import Settings
from dropforge.cloud import clients
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.executions import LIVE, find_execution, start_execution, state_of
from dropforge.money import Notice, due_of_budget
from dropforge.platforms import get_server
from dropforge.platforms.serving import Deployment
from dropforge.run.record import Record, RunState, utc_now
from dropforge.run.store import RunStore
from dropforge.stages.cancel import END_TOLD, tell_unstarted
from dropforge.stages.notify import notify, tell, warn
from dropforge.stages.provision import launch_of
from dropforge.stages.submit import accept_again, note_execution, resume, submit_object
from dropforge.stages.teardown import delete_remaining, end_endpoint

LOST_AFTER = timedelta(seconds=10)  # by then the first delivery has done its part, or has died
LOST_FOR = timedelta(days=7)  # what is older has been swept for a week, or was put there before the deployment was
ENDPOINT_LOST = "endpoint-lost"  # a notice's key
# A call that found its run open may write into the ledger after the end, and leaves that to whoever looks: none of
# these calls lasts longer than a function may (540 s, terraform/functions.tf).
LATE_FOR = timedelta(minutes=15)


def specs(settings: Settings) -> list[Any]:
    """Every spec object in the inbox, as a Blob with its generation, size and time."""
    fields = "items(name,generation,size,timeCreated),nextPageToken"
    blobs = clients.storage().list_blobs(
        settings.specs_bucket, prefix=names.SPECS_PREFIX, fields=fields, timeout=TIMEOUT_SECONDS
    )
    return [blob for blob in blobs if names.is_spec_object(blob.name)]


def submit(store: RunStore, blob: Any, settings: Settings, now: datetime) -> str:
    """Submit a spec that should have a run by now; the run, or "" when there is nothing to do."""
    generation = str(blob.generation)
    run = names.run_id_of_object(settings.specs_bucket, blob.name, generation)
    if not LOST_AFTER < now - blob.time_created < LOST_FOR or store.exists(run):
        return ""
    log("a spec that was dropped and has no run", stage="sweep", run=run, severity="WARNING", resource=blob.name)
    # No event comes again for it: until people have been told that it is refused, the sweep must look at it.
    store.put_new(
        names.open_object(run), f"gs://{settings.specs_bucket}/{blob.name}#{generation}".encode(), "text/plain"
    )
    record = submit_object(settings.specs_bucket, blob.name, generation, int(blob.size or 0))
    if record.state is RunState.REJECTED:
        store.update(run, lambda found: found.with_notice(END_TOLD))
    return run


def accept(store: RunStore, run: str, since: datetime, now: datetime) -> str:
    """Make the record of a run that was about to be accepted; the run, or "" when it may yet be without us.

    One without a spec was marked by `submit` and never accepted: the inbox has its spec still, or it was deleted.
    """
    if now - since < LOST_AFTER:
        return ""
    if not store.has_spec(run):
        if now - since > LATE_FOR:
            store.close(run)
        return ""
    log("a run that was to be accepted and has no record", stage="sweep", run=run, severity="WARNING")
    accept_again(run)
    return run


def restart(store: RunStore, record: Record, live: frozenset[str], settings: Settings) -> bool:
    """Have an execution go on with a run that is not over; False when one does, or is about to.

    The one that has ended never owns the run again. Whoever dies in here leaves a run without one, for the next sweep.
    """
    run, old = record.run, record.execution
    if old in live or (old and state_of(old, settings) in LIVE):  # it may have started since they were listed
        return False
    if old:
        record = store.update(run, lambda found: found.released(old))
        if record.execution or record.state.is_terminal:
            return False  # it came to its end after all, or another sweep was faster
    if record.state is RunState.ACCEPTED:
        try:
            return resume(store, record).execution is not None
        except RetryLater:
            return False
    log("a run that no execution goes on with", stage="sweep", run=run, severity="WARNING", state=record.state)
    execution = find_execution(run, record.created, settings) or start_execution(run, settings)
    note_execution(store, record, execution)
    return True


def settle(
    store: RunStore,
    record: Record,
    listed: frozenset[str],
    live: frozenset[str] | None,
    settings: Settings,
    now: datetime,
) -> None:
    """What a run that is over has left goes, but for its endpoint, and its end is told; later, it is open no more.

    What its endpoint has cost is warned of here, and its end told: nobody else looks at it any more.

    `listed` are the names of all that the cloud lists. `live` is None when nobody knows which executions are.
    """
    run, is_over = record.run, False
    try:
        if _is_served(record, now) and not _has_lost_endpoint(store, record, listed, settings):
            delete_remaining(store, run, keep_endpoint=True)
            _warn_of_budget(store, record, now)
        elif record.endpoint:
            is_over = end_endpoint(store, run) and _tell_of_endpoint(store, store.record(run))
        else:
            is_over = not delete_remaining(store, run)
    finally:
        is_told = live is not None and _tell(store, record, live, settings)
    if is_over and is_told and now - record.history[-1].time > LATE_FOR:
        store.close(run)


def _is_served(record: Record, now: datetime) -> bool:
    endpoint = record.endpoint
    is_kept = endpoint is not None and endpoint.ended is None and endpoint.expires >= now
    return is_kept and record.state is RunState.SUCCEEDED


def _warn_of_budget(store: RunStore, record: Record, now: datetime) -> None:
    spec = store.spec(record.run)
    for notice in due_of_budget(record, spec, now):
        warn(store, record, spec, notice)


def _has_lost_endpoint(store: RunStore, record: Record, listed: frozenset[str], settings: Settings) -> bool:
    """Whether somebody else has deleted what a run serves. People are told first, and once.

    That a list lacks it proves nothing: the cloud is asked for it by its name, and then the record is read again, for
    we may have ended it ourselves.
    """
    parts = [entry.name for entry in store.ledger(record.run).remaining() if entry.is_endpoint(record.run)]
    if parts and listed.issuperset(parts):
        return False
    spec = store.spec(record.run)
    assert spec.serve is not None, "only a run that serves has an endpoint"
    assert record.endpoint is not None
    deployment = Deployment(record.run, spec, settings, record.endpoint.expires, launch_of(record, spec))
    if get_server(spec.serve.type).exists(deployment):
        return False
    record = store.record(record.run)
    if record.endpoint is None or not _is_served(record, utc_now()):
        return False
    text = (
        f"{record.endpoint.service} does not exist any more, and its time was not over: it was deleted from outside. "
        f"What is left of the endpoint is deleted as well; the model is kept"
    )
    notice = Notice(ENDPOINT_LOST, "has lost its endpoint", text)
    return notice.key in warn(store, record, spec, notice).notices  # untold, it is looked for again


def _tell_of_endpoint(store: RunStore, record: Record) -> bool:
    """Tell people, once, that what was served has ended, and why; False: they could not be told yet."""
    endpoint, spec = record.endpoint, store.spec(record.run)
    assert endpoint is not None
    assert spec.serve is not None, "only a run that serves has an endpoint"
    if record.state is not RunState.SUCCEEDED or ENDPOINT_LOST in record.notices:
        return True
    why = f"its ttl of {spec.serve.ttl} is over"
    if record.cancel_requested:
        why = "somebody has cancelled it"
    elif endpoint.limit == "max_cost_usd":
        why = "the budget is spent"
    cost = record.serving_cost(utc_now())
    price = "" if cost is None else f"; it cost at most ${cost:.2f}"
    text = f"{endpoint.service} is deleted: {why}{price}. The model is kept"
    notice = Notice("endpoint-ended", "is not served any more", text)
    return notice.key in warn(store, record, spec, notice).notices


def _tell(store: RunStore, record: Record, live: frozenset[str], settings: Settings) -> bool:
    """Tell of an end whose execution died before it had; False while one is about it. An event's id is its state's."""
    tell_unstarted(store, record)
    if record.state is RunState.REJECTED and END_TOLD not in record.notices:
        tell(record)
        store.update(record.run, lambda found: found.with_notice(END_TOLD))
    execution = record.execution
    if execution is None or END_TOLD in record.notices:
        return True
    if execution in live or (state := state_of(execution, settings)) in LIVE:
        return False
    if state == "SUCCEEDED":
        return True
    log("an end that may not have been told", stage="sweep", run=record.run, severity="WARNING", state=record.state)
    if notify(record.run, execution, record.state, record.error)["status"] != "NOTIFIED":
        return False
    store.update(record.run, lambda found: found.with_notice(END_TOLD))
    return True
