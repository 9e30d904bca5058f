"""Stage `teardown`: delete every resource in the ledger and verify the deletion, on every path out of a run.

The call that sees the last resource gone ends the run in one conditional write, and then reports the end. A message
may therefore be sent twice, with the same event id, but never for a state that the run has not entered.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

from dropforge.base.changes import evolve
from dropforge.base.errors import CloudError, OverQuota
from dropforge.context import Context
from dropforge.run.record import Ledger, LedgerEntry, Outcome, Record, ResourceState, RunState
from dropforge.stages.deletion import delete_all, note_endpoint_ended, note_gone, with_endpoint_ended
from dropforge.tell.run_events import announce

from .answers import Ended, Gone, Pending, Superseded, superseded
from .ending import finish
from .looks import LONGEST_SECONDS, next_look_since, next_turn

Scope = int | Literal["run"]  # the number of an attempt, or all of the run
# A deletion that is slower than any cluster's may never end unless a person intervenes.
SLOW_AFTER = timedelta(minutes=30)
SLOW_RETRY_SECONDS = 60
# If a message about an end fails, the pause before the next try is the time since the end. Tries do not go for ever.
FIRST_TRY_SECONDS, LAST_TRY_SECONDS = 1.0, 600.0
TELL_FOR = timedelta(hours=4)

TeardownAnswer = Gone | Ended | Pending | Superseded


def teardown(
    context: Context,
    run: str,
    execution: str,
    scope: Scope,
    keep_endpoint: bool,
    outcome: Outcome | None = None,
) -> TeardownAnswer:
    """Delete the resources of a run. Raises NotFound for an unknown run, CloudError if another try may succeed.

    `scope` is the number of an attempt after it (another attempt or the endpoint follows), or "run" at the run's end. A
    call that nobody waits for any more deletes nothing of the attempt that has begun meanwhile.
    `keep_endpoint` spares the endpoint, which then lives for its ttl, and the machine that becomes the endpoint; a
    cancelled run keeps neither. The run ends with `outcome` as soon as its resources are gone. The record keeps the
    outcome, so that another execution can end the run if this execution does not.
    """
    known = context.store.known(run)
    if known is not None and outcome is not None and _is_entered(known, execution, outcome):
        record = known  # the write of the end decides whether it still is
    else:
        record = context.store.update(run, lambda latest: _enter(latest, execution, scope, outcome, context.now()))
    if record.execution != execution:
        return superseded(record)
    if outcome is not None and record.state.is_terminal:
        return _told(context, record)  # an earlier call has ended the run
    while True:
        is_kept = keep_endpoint and record.cancel_requested is None
        try:
            deleted = delete_all(context, _ledger_of(record, scope), keep_endpoint=is_kept)
        except OverQuota:
            _announce(context, record, scope)
            return _later(context, record, scope)
        except CloudError:
            _announce(context, record, scope)
            raise
        if deleted.remaining or outcome is None:
            note_gone(context, run, deleted)
        if deleted.remaining:
            _announce(context, record, scope)
            return _pending(context, record, scope, deleted.remaining)
        context.log("gone", stage="teardown", run=run, scope=scope)
        if outcome is None:
            _announce(context, record, scope)
            return _gone(context, record, is_kept)
        record = _end(context, record, outcome, is_kept, deleted.gone)
        if record.execution != execution:
            return superseded(record)
        if record.state.is_terminal:
            return _told(context, record)
        # A user has cancelled the run since the function looked: the endpoint must go, too.


def _announce(context: Context, record: Record, scope: Scope) -> None:
    """Announce a teardown that this call does not end. The announcement of an end includes its teardown."""
    if scope == "run" and record.state is RunState.TEARING_DOWN:
        announce(context, record, RunState.TEARING_DOWN)


def _gone(context: Context, record: Record, is_kept: bool) -> Gone:
    if record.endpoint and not is_kept:
        note_endpoint_ended(context, record.run)
    return Gone(cancelled=record.cancel_requested is not None)


def _end(context: Context, record: Record, outcome: Outcome, is_kept: bool, gone: list[str]) -> Record:
    """End a run whose resources are gone. A cancel wins; while the endpoint is kept, a cancelled run continues."""
    execution = record.execution

    def change(latest: Record) -> Record:
        latest = latest.with_ledger(lambda ledger: ledger.with_state(gone, ResourceState.GONE, context.now()))
        cancelled = latest.cancel_requested is not None
        if latest.execution != execution or latest.state.is_terminal or (cancelled and is_kept):
            return latest
        state, now = RunState.CANCELLED if cancelled else outcome.state, context.now()
        ended = evolve(latest.entered(state, now), error=outcome.error, callback_url=None)
        return ended if is_kept else with_endpoint_ended(ended, now)

    return context.store.update(record.run, change)


def _told(context: Context, record: Record) -> Ended | Pending:
    """Report the end of a run. If that fails, later calls try again, for a while."""
    if finish(context, record):
        return Ended(state=record.state)
    since = context.now() - record.history[-1].time
    if since < TELL_FOR:
        return Pending(wait_seconds=min(LAST_TRY_SECONDS, max(FIRST_TRY_SECONDS, since.total_seconds())))
    context.log("not everybody was told of the end", stage="notify", run=record.run, severity="ERROR")
    return Ended(state=record.state)


def _pending(context: Context, record: Record, scope: Scope, entries: list[LedgerEntry]) -> Pending:
    """Call again soon; after SLOW_AFTER, call again less often and log a warning for the alert run_stuck."""
    remaining = [entry.name for entry in entries]
    began, now = _began(record, scope), context.now()
    if now - began < SLOW_AFTER:
        usual = max(context.platforms.usual(entry.kind).deletion for entry in entries)
        return Pending(wait_seconds=next_look_since(began, now, usual), remaining=remaining)
    message = f"not gone after {(now - began).total_seconds() / 60:.0f} min"
    context.log(message, stage="teardown", run=record.run, severity="WARNING", resources=remaining)
    return Pending(wait_seconds=SLOW_RETRY_SECONDS, remaining=remaining)


def _later(context: Context, record: Record, scope: Scope) -> Pending:
    """Call again after a deletion that was refused for a rate: every request counts, so the longer, the rarer."""
    remaining = [entry.name for entry in _ledger_of(record, scope).remaining()]
    waited = (context.now() - _began(record, scope)).total_seconds()
    return Pending(wait_seconds=next_turn(waited, LONGEST_SECONDS), remaining=remaining)


def _began(record: Record, scope: Scope) -> datetime:
    """When the teardown of a run, or of its attempt, began."""
    ended = next((attempt.ended for attempt in record.attempts if attempt.number == scope), None)
    return ended or record.history[-1].time


def _ledger_of(record: Record, scope: Scope) -> Ledger:
    return record.ledger if scope == "run" else record.ledger.up_to(scope)


def _without_waiting_attempt(record: Record, now: datetime) -> Record:
    """The record with the end of an attempt that was cancelled before any of its machines was seen to run.

    The deletion of its own cluster takes a quarter of an hour, in which no machine runs: that time costs nothing.
    """
    latest = record.attempts[-1] if record.attempts else None
    if latest is None or latest.ended or latest.running or latest.seen or record.state is not RunState.PROVISIONING:
        return record
    return record.with_stop(latest.number, now)


def _is_entered(record: Record, execution: str, outcome: Outcome) -> bool:
    """Whether an execution needs to write nothing before it deletes: `inspect`, or an earlier call, has written it.

    A run that is torn down gets no further resource, so its ledger lists all that is to be deleted, however old it is.
    """
    return (record.execution, record.state, record.outcome) == (execution, RunState.TEARING_DOWN, outcome)


def _enter(record: Record, execution: str, scope: Scope, outcome: Outcome | None, now: datetime) -> Record:
    record = record.claimed(execution)
    if record.execution != execution or record.state.is_terminal or scope != "run":
        return record
    if record.outcome is None and outcome is not None:
        record = evolve(record, outcome=outcome)
    return _without_waiting_attempt(record, now).entered(RunState.TEARING_DOWN, now)
