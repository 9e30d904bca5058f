"""The protocol of a channel: a module that sends messages to people. channels.py lists the channels."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from dropforge.base.settings import Settings
from dropforge.context import Context
from dropforge.spec import JobSpec

from .news import News


class Failure(NamedTuple):
    """Why a message was not sent, without any secret; `may_pass`: another try may succeed."""

    problem: str
    may_pass: bool


class Channel(Protocol):
    """The functions of a channel's module. `T` below is the channel's own type of address."""

    NAME: str

    def secrets_of(self, spec: JobSpec) -> dict[str, str]:
        """The secrets that a spec names for this channel, by JSON pointer. Admission checks that they exist."""

    def address_of(self, spec: JobSpec | None, settings: Settings) -> Any | None:
        """Where a run's messages go (T): names of secrets, no values; None if neither spec nor deployment says it."""

    def send(self, context: Context, address: Any, news: News) -> Failure | None:
        """Send a message to an address (T); None on success, or if the channel has no such messages. Never raises."""
