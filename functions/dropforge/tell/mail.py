"""Channel e-mail: plain texts by a mail server, whose URL with user and password is a secret (smtp.py sends)."""

from __future__ import annotations

from typing import NamedTuple

from dropforge.base.settings import Settings
from dropforge.context import Context
from dropforge.spec import JobSpec

from .channel import Failure
from .news import News
from .values import Unreadable, value_of

NAME = "email"


class Address(NamedTuple):
    """The people, and the secret with the mail server's URL."""

    server_secret: str
    to: tuple[str, ...]


def secrets_of(spec: JobSpec) -> dict[str, str]:
    """The secret of a spec, by JSON pointer; empty without e-mail."""
    return {"/notify/email/server_secret": spec.notify.email.server_secret} if spec.notify.email else {}


def address_of(spec: JobSpec | None, settings: Settings) -> Address | None:
    """The spec's addresses; a deployment has none of its own."""
    email = spec.notify.email if spec else None
    return Address(email.server_secret, tuple(email.to)) if email else None


def send(context: Context, address: Address, news: News) -> Failure | None:
    """Send one e-mail to all addresses; None on success. Never raises."""
    from .smtp import deliver  # 0.1 s of imports, which only runs with e-mail need

    try:
        url = value_of(context.cloud, address.server_secret)
    except Unreadable as unreadable:
        return unreadable.failure
    place = f"e-mail by the server of secret {address.server_secret!r}"
    return deliver(url, context.cloud.clients.smtp_emulator(), address.to, news, place)
