"""Stage `teardown`: every resource that the ledger knows is deleted and verified gone, on every path out of a run."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from dropforge.base.errors import CloudError
from dropforge.base.log import log
from dropforge.platforms import owner_of
from dropforge.run.record import LedgerEntry, Outcome, Record, ResourceState, RunState, utc_now
from dropforge.run.store import RunStore, open_store

from .answers import superseded, waiting
from .notify import announce

RETRY_SECONDS = 3
# A cluster takes a quarter of an hour to delete. What takes longer may never go, unless somebody looks at it.
SLOW_AFTER = timedelta(minutes=30)
SLOW_RETRY_SECONDS = 60


def teardown(
    run: str, execution: str, scope: str, keep_endpoint: bool, outcome: Outcome | None = None
) -> dict[str, Any]:
    """Delete the resources of a run. Raises NotFound for an unknown run, CloudError for what may pass.

    `scope` is "attempt" after an attempt (the run goes on, to another one or to its endpoint) or "run" at its end;
    `keep_endpoint` spares the endpoint, which then lives for its ttl, and the machine that is to become it; a cancelled
    run keeps none. `outcome` is how the run ends after it: kept, so that another execution can end the run if this one
    does not. Answers {"status": "GONE" | "PENDING" | "SUPERSEDED", "cancelled": bool, ...}.
    """
    store = open_store()
    record = store.update(run, lambda found: _enter(found, execution, scope, outcome))
    if record.execution != execution:
        return superseded(record)
    if scope == "run" and record.state is RunState.TEARING_DOWN:
        announce(record, RunState.TEARING_DOWN)
    cancelled = record.cancel_requested is not None
    keep_endpoint = keep_endpoint and not cancelled
    remaining = delete_remaining(store, run, keep_endpoint=keep_endpoint)
    if remaining:
        return _not_gone(record, scope, [entry.name for entry in remaining], utc_now())
    if record.endpoint and not keep_endpoint:
        _note_endpoint_gone(store, run)
    log("gone", stage="teardown", run=run, scope=scope)
    return {"status": "GONE", "cancelled": cancelled}


def _not_gone(record: Record, scope: str, remaining: list[str], now: datetime) -> dict[str, Any]:
    """Call again: soon, or less often once that has been answered for long, which is logged for the alert run_stuck."""
    ended = record.attempts[-1].ended if record.attempts else None
    began = record.history[-1].time if scope == "run" else ended
    if began is None or now - began < SLOW_AFTER:
        return {**waiting("PENDING", RETRY_SECONDS), "remaining": remaining}
    message = f"not gone after {(now - began).total_seconds() / 60:.0f} min"
    log(message, stage="teardown", run=record.run, severity="WARNING", resources=remaining)
    return {**waiting("PENDING", SLOW_RETRY_SECONDS), "remaining": remaining}


def delete_remaining(store: RunStore, run: str, *, keep_endpoint: bool = False) -> list[LedgerEntry]:
    """Push every resource that is left towards gone; what remains after that.

    One that cannot be deleted spares none of the others: its CloudError is raised after them.
    """
    remaining, refusals = [], []
    for entry in store.ledger(run).remaining():
        if keep_endpoint and entry.is_endpoint(run):
            continue
        try:
            gone = delete_resource(entry.kind, entry.name)
        except CloudError as error:
            refusals.append(error)
            continue
        if gone:
            store.note(run, entry.name, ResourceState.GONE)
        else:
            remaining.append(entry)
    if refusals:
        raise refusals[0]
    return remaining


def end_endpoint(store: RunStore, run: str) -> bool:
    """Delete the endpoint of a finished run; True once it is verified gone."""
    if delete_remaining(store, run):
        return False
    _note_endpoint_gone(store, run)
    log("endpoint gone", stage="teardown", run=run)
    return True


def _note_endpoint_gone(store: RunStore, run: str) -> None:
    def change(record: Record) -> Record:
        if record.endpoint is None or record.endpoint.ended:
            return record
        return record.model_copy(update={"endpoint": record.endpoint.model_copy(update={"ended": utc_now()})})

    store.update(run, change)


def delete_resource(kind: str, name: str) -> bool:
    """Push one resource towards gone; True once it was seen not to exist. Raises CloudError."""
    return owner_of(kind).teardown(kind, name)


def _enter(record: Record, execution: str, scope: str, outcome: Outcome | None) -> Record:
    record = record.claimed(execution)
    if record.execution != execution or record.state.is_terminal or scope != "run":
        return record
    moved = record.entered(RunState.TEARING_DOWN, utc_now())
    return moved if moved.outcome or outcome is None else moved.model_copy(update={"outcome": outcome})
