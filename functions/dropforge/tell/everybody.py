"""Tells other systems (run events) and people (channels) about a run."""

from __future__ import annotations

import json

from dropforge.base import names
from dropforge.context import Context
from dropforge.run.record import END_TOLD, Notice, Record, RunState
from dropforge.spec import JobSpec

from .channels import note, send_notice, send_state
from .report import report
from .run_events import announce, announce_notice

_UNSTARTED = ({RunState.ACCEPTED, RunState.CANCELLED}, {RunState.CANCELLED})


def tell(context: Context, record: Record, spec: JobSpec | None = None) -> None:
    """Publish a record's present state, and send it to people if the state has a message.

    Raises CloudError if the state is terminal and another try may succeed.
    """
    announce(context, record, record.state)
    send_state(context, record, spec)


def conclude(context: Context, record: Record, spec: JobSpec) -> None:
    """Write the report of a finished run and tell everybody. Raises CloudError if another try may succeed."""
    content = json.dumps(report(record, spec, context.now()), indent=2).encode()
    context.store.put_new(names.report_object(record.run), content)
    tell(context, record, spec)


def warn(context: Context, record: Record, spec: JobSpec, notice: Notice) -> Record:
    """Send a notice to everybody once; return the record, which has the notice's key if everybody got the notice.

    After a crash between sending and noting, the notice is sent again with the same event id.
    """
    if notice.key in record.notices:
        return record
    # Not a WARNING: the alert run_stuck counts the warnings of this stage as ends that could not be announced.
    context.log(notice.text, stage="notify", run=record.run, severity="NOTICE", notice=notice.key)
    is_published = announce_notice(context, record, notice)
    sent = send_notice(context, record, spec, notice)
    if not is_published or sent.waiting:
        return note(context, record, sent.keys)  # the next check sends the notice again, to the other channels
    return note(context, record, [notice.key])


def is_unstarted(record: Record) -> bool:
    """Whether a run was cancelled before it got an execution: no execution ends it or announces its end."""
    return {entered.state for entered in record.history} in _UNSTARTED


def tell_unstarted(context: Context, record: Record) -> None:
    """Announce the end of a run that was cancelled before it got an execution, unless it is announced.

    Raises CloudError if another try may succeed.
    """
    if not is_unstarted(record) or END_TOLD in record.notices:
        return
    if record.history[0].state is RunState.CANCELLED:
        tell(context, record)  # the spec was never read
    else:
        conclude(context, record, context.store.spec(record.run))
    context.store.update(record.run, lambda latest: latest.with_notice(END_TOLD))
