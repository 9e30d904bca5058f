"""Why an attempt, or an endpoint, does not run yet: the record keeps the reason, and a message reports a long wait.

A reason costs a write only when it changes, and none in the first seconds: most waits end before a user looks.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from dropforge.base.redact import cut
from dropforge.context import Context
from dropforge.run.record import MAX_REASON, Record
from dropforge.spec import JobSpec
from dropforge.tell import notices
from dropforge.tell.everybody import warn

QUIET_SECONDS = 10  # a shorter wait needs no reason
WARN_AFTER = timedelta(minutes=10)


def note_wait(context: Context, record: Record, reason: str, asked: datetime) -> Record:
    """The record of a run whose attempt had no running machine at `asked`, with the reason; written if it changes."""
    attempt = record.attempts[-1]
    is_due = asked - attempt.started >= timedelta(seconds=QUIET_SECONDS)

    def change(latest: Record) -> Record:
        noted = latest if attempt.is_noted_waiting(asked) else latest.with_waiting(attempt.number, asked)
        return noted.with_wait_reason(attempt.number, reason) if is_due else noted

    return record if change(record) is record else context.store.update(record.run, change)


def note_refusal(context: Context, record: Record, reason: str, *, nothing_exists: bool) -> Record:
    """The record of a run whose latest request for machines has failed, with the reason; written if it changes.

    `nothing_exists`: the cloud has refused every request of the attempt so far.
    """
    attempt = record.attempts[-1]
    is_due = context.now() - attempt.started >= timedelta(seconds=QUIET_SECONDS)

    def change(latest: Record) -> Record:
        noted = latest.with_refusal(attempt.number) if nothing_exists else latest
        return noted.with_wait_reason(attempt.number, reason) if is_due else noted

    return record if change(record) is record else context.store.update(record.run, change)


def note_endpoint_refusal(
    context: Context, record: Record, reason: str, began: datetime, *, nothing_exists: bool
) -> None:
    """Keep why the latest request for the endpoint has failed, as `note_refusal` does for an attempt."""
    is_due = context.now() - began >= timedelta(seconds=QUIET_SECONDS)

    def change(latest: Record) -> Record:
        noted = latest.with_endpoint_refusal() if nothing_exists else latest
        return noted.with_endpoint_wait_reason(reason) if is_due else noted

    if change(record) is not record:
        context.store.update(record.run, change)


def note_endpoint_wait(context: Context, record: Record, reason: str, began: datetime) -> None:
    """Keep the reason why the endpoint, created since `began`, is not ready; written if it changes."""
    if context.now() - began < timedelta(seconds=QUIET_SECONDS) or record.with_endpoint_wait_reason(reason) is record:
        return
    context.store.update(record.run, lambda latest: latest.with_endpoint_wait_reason(reason))


def warn_of_wait(context: Context, record: Record, spec: JobSpec) -> Record:
    """Tell people once that an attempt has waited WARN_AFTER without running, with the reason."""
    attempt = record.attempts[-1]
    waited = context.now() - attempt.started
    if waited < WARN_AFTER or attempt.ended or not attempt.wait_reason:
        return record
    return warn(context, record, spec, notices.waits(attempt))


def cancelled_while(reason: str, work: str) -> str:
    """What a run did when the cancel reached it: its reason for waiting, if it has any, or else the work."""
    return cut(f"cancelled while it waited: {reason}", MAX_REASON) if reason else f"cancelled while {work}"
