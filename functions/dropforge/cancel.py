"""Cancelling: an intent in the record that every later stage obeys; for a finished run, the end of its endpoint."""

from __future__ import annotations

import requests

from .errors import NotFound, RetryLater
from .executions import wake
from .log import log
from .names import is_run_id
from .runs import Record, RunState, open_store, utc_now
from .teardown import end_endpoint


def cancel(run: str) -> None:
    """Ask for the end of a run. Raises RetryLater until a finished run's endpoint is verified gone."""
    if not is_run_id(run):
        log("not a run id", stage="submit", run=run[:100], severity="WARNING")
        return
    store = open_store()
    try:
        record = store.update(run, _with_intent)
    except NotFound:
        log("there is no such run to cancel", stage="submit", run=run, severity="WARNING")
        return
    log("cancel requested", stage="submit", run=run, state=record.state)
    if record.state is RunState.TEARING_DOWN and not record.cancel_requested:
        raise RetryLater(f"run {run} is ending; its endpoint, if it keeps one, is ended once it has ended")
    if record.state.is_terminal:
        if record.endpoint and not record.endpoint.ended and not end_endpoint(store, run):
            raise RetryLater(f"the endpoint of run {run} is being deleted")
    elif record.callback_url:
        _wake(record)


def _with_intent(record: Record) -> Record:
    """Once teardown has begun, whether the endpoint stays is decided: the intent would come too late to be obeyed."""
    if record.cancel_requested or record.state.is_terminal or record.state is RunState.TEARING_DOWN:
        return record
    return record.model_copy(update={"cancel_requested": utc_now()})


def _wake(record: Record) -> None:
    """Best effort: without it the run notices at its next look."""
    try:
        wake(str(record.callback_url), {"type": "cancel"})
    except requests.RequestException as error:
        log("the execution could not be woken", stage="submit", run=record.run, problem=type(error).__name__)
