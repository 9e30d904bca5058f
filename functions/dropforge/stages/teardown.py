"""Stage `teardown`: delete every resource in the ledger and verify the deletion, on every path out of a run."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

from dropforge.context import Context
from dropforge.deletion import delete_remaining, note_endpoint_ended
from dropforge.run.record import Outcome, Record, RunState
from dropforge.tell.run_events import announce

from .answers import Gone, Pending, Superseded, superseded

Scope = Literal["attempt", "run"]
RETRY_SECONDS = 3
# A cluster takes a quarter of an hour to delete. A slower deletion may never end unless a person intervenes.
SLOW_AFTER = timedelta(minutes=30)
SLOW_RETRY_SECONDS = 60


def teardown(
    context: Context, run: str, execution: str, scope: Scope, keep_endpoint: bool, outcome: Outcome | None = None
) -> Gone | Pending | Superseded:
    """Delete the resources of a run. Raises NotFound for an unknown run, CloudError if another try may succeed.

    `scope` is "attempt" after an attempt (another attempt or the endpoint follows) or "run" at the run's end.
    `keep_endpoint` spares the endpoint, which then lives for its ttl, and the machine that becomes the endpoint; a
    cancelled run keeps neither. `outcome` is the end of the run after the teardown: the record keeps it, so that
    another execution can end the run if this execution does not.
    """
    record = context.store.update(run, lambda latest: _enter(latest, execution, scope, outcome, context.now()))
    if record.execution != execution:
        return superseded(record)
    if scope == "run" and record.state is RunState.TEARING_DOWN:
        announce(context, record, RunState.TEARING_DOWN)
    cancelled = record.cancel_requested is not None
    keep_endpoint = keep_endpoint and not cancelled
    remaining = delete_remaining(context, run, keep_endpoint=keep_endpoint)
    if remaining:
        return _pending(context, record, scope, [entry.name for entry in remaining])
    if record.endpoint and not keep_endpoint:
        note_endpoint_ended(context, run)
    context.log("gone", stage="teardown", run=run, scope=scope)
    return Gone(cancelled=cancelled)


def _pending(context: Context, record: Record, scope: Scope, remaining: list[str]) -> Pending:
    """Call again soon; after SLOW_AFTER, call again less often and log a warning for the alert run_stuck."""
    ended = record.attempts[-1].ended if record.attempts else None
    began = record.history[-1].time if scope == "run" else ended
    now = context.now()
    if began is None or now - began < SLOW_AFTER:
        return Pending(wait_seconds=RETRY_SECONDS, remaining=remaining)
    message = f"not gone after {(now - began).total_seconds() / 60:.0f} min"
    context.log(message, stage="teardown", run=record.run, severity="WARNING", resources=remaining)
    return Pending(wait_seconds=SLOW_RETRY_SECONDS, remaining=remaining)


def _enter(record: Record, execution: str, scope: Scope, outcome: Outcome | None, now: datetime) -> Record:
    record = record.claimed(execution)
    if record.execution != execution or record.state.is_terminal or scope != "run":
        return record
    moved = record.entered(RunState.TEARING_DOWN, now)
    return moved if moved.outcome or outcome is None else moved.model_copy(update={"outcome": outcome})
