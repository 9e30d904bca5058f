"""The channels. A new channel is a module beside this file and an entry in CHANNELS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.context import Context
from dropforge.run.record import Notice, Record
from dropforge.spec import JobSpec

from . import slack
from .channel import Channel, Failure

CHANNELS: tuple[Channel, ...] = (slack,)


def secrets_of(spec: JobSpec) -> dict[str, str]:
    """The secrets that a spec names for channels, by JSON pointer."""
    return {pointer: secret for channel in CHANNELS for pointer, secret in channel.secrets_of(spec).items()}


def send_state(context: Context, record: Record, spec: JobSpec | None = None) -> None:
    """Send the message for a record's present state to every channel.

    Raises CloudError (TRANSIENT) if the state is terminal, a message was not sent, and another try may succeed. Other
    states never raise: a running run must not wait for a channel.
    """
    now = context.now()
    failures = _send(context, record, spec, lambda channel: channel.state_message(record, spec, context.settings, now))
    for failure in failures:
        if failure.may_pass and record.state.is_terminal:
            raise CloudError(ErrorClass.TRANSIENT, failure.problem)


def send_notice(context: Context, record: Record, spec: JobSpec, notice: Notice) -> bool:
    """Send a notice to every channel; False if a message was not sent and another try may succeed."""
    failures = _send(context, record, spec, lambda channel: channel.notice_message(record, notice))
    return not any(failure.may_pass for failure in failures)


def _send(
    context: Context, record: Record, spec: JobSpec | None, message_for: Callable[[Channel], Any | None]
) -> list[Failure]:
    """Send a message to every channel that the spec, or the deployment, configures; log and return the failures."""
    failures = []
    for channel in CHANNELS:
        secret, message = channel.secret_of(spec, context.settings), message_for(channel)
        if message is None or not secret:
            continue
        if failure := channel.send(context.cloud, secret, message):
            context.log(failure.problem, stage="notify", run=record.run, severity="ERROR")
            failures.append(failure)
    return failures
