"""Stage `notify`: enter a state, then tell other systems and people.

Two callers remain: executions of workflows from before 2026-11-24, and the sweep, which reports an end that was not
reported. In newer workflows, `inspect` enters TRAINING and `teardown` ends the run.

The state is written first. A message may therefore be sent twice, with the same event id, but never for a state that
the run has not entered.
"""

from __future__ import annotations

from datetime import datetime

from dropforge.base.errors import Conflict
from dropforge.context import Context
from dropforge.money import running_since
from dropforge.run.record import Record, RunError, RunState
from dropforge.tell.everybody import tell

from .answers import CancelWins, Notified, Superseded, Untold, superseded
from .ending import finish


def notify(
    context: Context, run: str, execution: str, state: RunState, error: RunError | None
) -> Notified | CancelWins | Superseded:
    """Enter `state` and tell everybody. Raises NotFound for an unknown run.

    CancelWins: a user has requested the end of the run after teardown looked, so no success is written. The caller
    tears down the endpoint and calls again with CANCELLED.
    """
    store = context.store

    def enter(record: Record) -> Record:
        return _enter(record, execution, state, error, context.now())

    try:
        record = store.update(run, enter)
    except Conflict as conflict:
        context.log(str(conflict), stage="notify", run=run, severity="WARNING")
        return superseded(store.record(run))
    if _cancel_wins(record, execution, state):
        return CancelWins(state=record.state)
    if record.execution != execution or record.state is not state:
        return superseded(record)
    if state.is_terminal:
        return Notified(state=record.state) if finish(context, record) else Untold(state=record.state)
    tell(context, record, store.spec(run))
    context.log(state.lower(), stage="notify", run=run)
    return Notified(state=record.state)


def _enter(record: Record, execution: str, state: RunState, error: RunError | None, now: datetime) -> Record:
    if record.execution != execution or record.state is state or _cancel_wins(record, execution, state):
        return record
    moved = record.entered(state, now)
    if state is RunState.TRAINING:
        return moved.with_running(record.attempt, running_since(record.attempts[-1]))
    return moved.model_copy(update={"error": error, "callback_url": None}) if state.is_terminal else moved


def _cancel_wins(record: Record, execution: str, state: RunState) -> bool:
    """Whether a cancel overrides this success."""
    is_requested = record.cancel_requested is not None and not record.state.is_terminal
    return is_requested and record.execution == execution and state is RunState.SUCCEEDED
