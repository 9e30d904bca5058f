"""The channels. A new channel is a module beside this file and an entry in CHANNELS."""

from __future__ import annotations

from typing import NamedTuple

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.context import Context
from dropforge.run.record import Notice, Record
from dropforge.spec import JobSpec

from . import github, mail, otlp, slack, teams, webhook
from .channel import Channel, Failure
from .news import News, notice_news, state_news

CHANNELS: tuple[Channel, ...] = (slack, webhook, teams, mail, github, otlp)


class Sent(NamedTuple):
    """The result of a message to every channel: the keys of the channels that took it, and the failures."""

    keys: list[str]
    failures: list[Failure]

    @property
    def waiting(self) -> str:
        """Why a channel did not take the message, if another try may succeed; "" otherwise."""
        return next((failure.problem for failure in self.failures if failure.may_pass), "")


def secrets_of(spec: JobSpec) -> dict[str, str]:
    """The secrets that a spec names for channels, by JSON pointer."""
    return {pointer: secret for channel in CHANNELS for pointer, secret in channel.secrets_of(spec).items()}


def send_state(context: Context, record: Record, spec: JobSpec | None = None) -> None:
    """Send the message for a record's present state to every channel that has not taken it.

    Raises CloudError (TRANSIENT) if the state is terminal, a message was not sent, and another try may succeed. The
    record then names the channels that have the message. Other states never raise: a running run must not wait for a
    channel.
    """
    news = state_news(record, spec, context.settings, context.now())
    if news is None:
        return
    sent = _send(context, record, spec, news)
    if sent.waiting and record.state.is_terminal:
        note(context, record, sent.keys)
        raise CloudError(ErrorClass.TRANSIENT, sent.waiting)


def send_notice(context: Context, record: Record, spec: JobSpec, notice: Notice) -> Sent:
    """Send a notice to every channel that has not taken it."""
    return _send(context, record, spec, notice_news(record, notice, context.settings, context.now()))


def note(context: Context, record: Record, keys: list[str]) -> Record:
    """Note keys of notices and of channels that took a message, in one write; return the record."""
    if not keys:
        return record

    def change(latest: Record) -> Record:
        for key in keys:
            latest = latest.with_notice(key)
        return latest

    return context.store.update(record.run, change)


def _send(context: Context, record: Record, spec: JobSpec | None, news: News) -> Sent:
    """Send a message to every channel that the spec, or the deployment, configures; log the failures.

    The record names the channels that took the message at an earlier try: they do not get it again.
    """
    sent = Sent([], [])
    for channel in CHANNELS:
        address = channel.address_of(spec, context.settings)
        key = f"{news.event.id.removeprefix(record.run + '/')}@{channel.NAME}"
        if address is None or key in record.notices:
            continue
        if failure := channel.send(context, address, news):
            context.log(failure.problem, stage="notify", run=record.run, severity="ERROR")
            sent.failures.append(failure)
        if failure is None or not failure.may_pass:
            sent.keys.append(key)
    return sent
