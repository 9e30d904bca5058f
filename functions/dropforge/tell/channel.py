"""The protocol of a channel: a module that sends messages to people. channels.py lists the channels."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple, Protocol

from dropforge.base.settings import Settings
from dropforge.cloud.context import Cloud
from dropforge.run.record import Notice, Record
from dropforge.spec import JobSpec


class Failure(NamedTuple):
    """Why a message was not sent, without any secret; `may_pass`: another try may succeed."""

    problem: str
    may_pass: bool


class Channel(Protocol):
    """The functions of a channel's module. `M` below is the channel's own type of message."""

    def secrets_of(self, spec: JobSpec) -> dict[str, str]:
        """The secrets that a spec names for this channel, by JSON pointer. Admission checks that they exist."""

    def secret_of(self, spec: JobSpec | None, settings: Settings) -> str:
        """The secret with the address for a run's messages; "" if neither spec nor deployment names a secret."""

    def state_message(self, record: Record, spec: JobSpec | None, settings: Settings, now: datetime) -> Any | None:
        """The message (M) for the present state of a record; None for a state without a message."""

    def notice_message(self, record: Record, notice: Notice) -> Any:
        """The message (M) for a notice."""

    def send(self, cloud: Cloud, secret: str, message: Any) -> Failure | None:
        """Send a message (M) to the address in the secret; None on success. Never raises."""
