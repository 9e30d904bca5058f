"""Cancelling: an intent that is kept before anybody acts on it, and that every later step obeys.

Kept in the record, it wins over provisioning, waiting, another attempt, deploying, and a teardown that would have kept
the endpoint; a run of which nothing has been made yet has ended with it. Kept beside a run that does not exist yet,
because the request has overtaken the spec, it is found by stage `submit`.
"""

from __future__ import annotations

import json

import requests

from dropforge.base import names
from dropforge.base.errors import NotFound, RetryLater
from dropforge.base.log import log
from dropforge.cloud import clients
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.executions import wake
from dropforge.run.record import Record, RunState, utc_now
from dropforge.run.store import RunStore, open_store

from .notify import conclude, tell
from .teardown import end_endpoint

END_TOLD = "end"  # among the notices of a record
_UNSTARTED = ({RunState.ACCEPTED, RunState.CANCELLED}, {RunState.CANCELLED})


def cancel(run: str) -> None:
    """Ask for the end of a run. Raises RetryLater until a finished run's endpoint is verified gone."""
    if not names.is_run_id(run):
        log("not a run id", stage="submit", run=run[:100], severity="WARNING")
        return
    store = open_store()
    record = _intend(store, run)
    if record is None:
        return
    log("cancel requested", stage="submit", run=run, state=record.state)
    if _is_unstarted(record):
        tell_unstarted(store, record)
    elif record.state.is_terminal:
        if record.endpoint and not record.endpoint.ended and not end_endpoint(store, run):
            raise RetryLater(f"the endpoint of run {run} is being deleted")
    elif record.callback_url:
        _wake(record)


def cancel_deleted(bucket: str, name: str, generation: str) -> None:
    """Cancel the run of a spec object that was deleted, unless the run has ended or the object was overwritten.

    The inbox may be tidied up: what a finished run serves is not ended. An upload under the same name is another run,
    and Cloud Storage tells of the object that it replaces as of one that was deleted.
    """
    run = names.run_id_of_object(bucket, name, generation)
    found = clients.storage().bucket(bucket).get_blob(name, timeout=TIMEOUT_SECONDS)
    if found is not None:
        log("the spec was overwritten", stage="submit", run=run, by=str(found.generation))
        return
    record = open_store().find(run)
    if record is not None and record.state.is_terminal and not _is_unstarted(record):
        log("the spec of a finished run was deleted", stage="submit", run=run, state=record.state)
        return
    cancel(run)


def tell_unstarted(store: RunStore, record: Record) -> None:
    """Tell of the end of a run that was cancelled before anything was made of it, unless that was done.

    Raises CloudError when trying again may help.
    """
    if not _is_unstarted(record) or END_TOLD in record.notices:
        return
    if record.history[0].state is RunState.CANCELLED:
        tell(record)  # its spec was never read
    else:
        conclude(store, record, store.spec(record.run))
    store.update(record.run, lambda found: found.with_notice(END_TOLD))


def was_cancelled(store: RunStore, run: str) -> bool:
    """Whether somebody has asked for the end of a run before it existed."""
    try:
        store.read(names.cancel_object(run))
    except NotFound:
        return False
    return True


def _intend(store: RunStore, run: str) -> Record | None:
    """Note the intent in the record; where there is none, beside it, which `submit` looks at once it has made one."""
    try:
        return store.update(run, _with_intent)
    except NotFound:
        requested = json.dumps({"cancel_requested": utc_now().isoformat()}).encode()
        store.put_new(names.cancel_object(run), requested)
    try:
        return store.update(run, _with_intent)
    except NotFound:
        log("cancelled before it was submitted", stage="submit", run=run, severity="WARNING")
        return None


def _with_intent(record: Record) -> Record:
    now = utc_now()
    if record.state.is_terminal:
        if record.endpoint is None or record.endpoint.ended or record.endpoint.expires <= now:
            return record
        # Its time is over now, so that the sweep ends it, whatever becomes of this request.
        expired = record.endpoint.model_copy(update={"expires": now})
        return record.model_copy(update={"endpoint": expired, "cancel_requested": now})
    if record.cancel_requested:
        return record
    asked = record.model_copy(update={"cancel_requested": now})
    return asked.entered(RunState.CANCELLED, now) if record.state is RunState.ACCEPTED else asked


def _is_unstarted(record: Record) -> bool:
    """Whether a run was cancelled before anything was made of it: no execution ends it, nor tells of its end."""
    return {entered.state for entered in record.history} in _UNSTARTED


def _wake(record: Record) -> None:
    """Best effort: without it the run notices at its next look."""
    try:
        wake(str(record.callback_url), {"type": "cancel"})
    except requests.RequestException as error:
        log("the execution could not be woken", stage="submit", run=record.run, problem=type(error).__name__)
