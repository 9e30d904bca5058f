"""Sends an e-mail by SMTP over TLS."""

from __future__ import annotations

import smtplib
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.errors import MessageError
from email.headerregistry import Address as Mailbox
from email.message import EmailMessage
from email.utils import format_datetime
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from .channel import Failure
from .news import News
from .outgoing import LIMIT_SECONDS, Refused, Server, dialled, server_of, tls_context

_SCHEMES = ("smtps", "smtp+starttls")


class Account(NamedTuple):
    """A mail server, and who sends. Without a user there is no login."""

    server: Server
    user: str
    password: str
    sender: Mailbox


def deliver(url: str, emulator: str, to: tuple[str, ...], news: News, place: str) -> Failure | None:
    """Send one e-mail to all addresses; None on success. Never raises. `place` says in errors whose server it is.

    If the server takes the message for only some addresses, it is not sent again: these addresses would get it twice.
    """
    try:
        account = account_of(url, emulator)
        message = message_of(news, account.sender, to)
        with _session(account) as session:
            refused = session.send_message(message, from_addr=account.sender.addr_spec, to_addrs=list(to))
    except Refused as reason:
        return Failure(f"{place}: its address {reason}", may_pass=False)
    except ssl.SSLCertVerificationError as error:
        return Failure(f"{place}: the certificate is not valid: {error.verify_message}", may_pass=False)
    except (
        smtplib.SMTPException,
        MessageError,
        ValueError,
    ) as error:  # their texts may repeat a password
        return Failure(f"{place}: {_reason(error)}", _may_pass(error))
    except OSError as error:
        return Failure(f"{place}: the server could not be reached: {type(error).__name__}", may_pass=True)
    if refused:
        return Failure(f"{place}: the server refused {len(refused)} of {len(to)} addresses", may_pass=False)
    return None


def account_of(url: str, emulator: str = "") -> Account:
    """The account in smtps://USER:PASSWORD@HOST:PORT?from=ADDRESS. Raises Refused.

    User and password are percent-encoded. Without `from`, the user is the sender.
    """
    try:
        parts = urlsplit(url)
        server = server_of(parts, _SCHEMES, emulator)
        user, password = unquote(parts.username or "", errors="strict"), unquote(parts.password or "", errors="strict")
        sender = parse_qs(parts.query).get("from", [user])[0]
        return Account(server, user, password, Mailbox("dropforge", addr_spec=sender))
    except (ValueError, IndexError, MessageError):  # their texts may repeat the password
        raise Refused("is not smtps://USER:PASSWORD@HOST:PORT?from=ADDRESS with a sender's address") from None


def message_of(news: News, sender: Mailbox, to: tuple[str, ...]) -> EmailMessage:
    """The e-mail. The e-mails of a run are one conversation, and a repeated message has the same Message-ID.

    Its headers are single lines: the title has no control characters, and EmailMessage refuses line breaks.
    """
    message = EmailMessage()
    message["Subject"] = f"[dropforge] {news.title}"
    message["From"] = sender
    message["To"] = ", ".join(to)
    message["Date"] = format_datetime(news.event.time)
    message["Message-ID"] = f"<{news.event.id.replace('/', '.')}@{sender.domain}>"
    message["References"] = f"<{news.event.run}@{sender.domain}>"
    message["Auto-Submitted"] = "auto-generated"  # RFC 3834: no automatic replies
    message.set_content(f"{news}\nmessage: {news.event.id}\n")
    return message


@contextmanager
def _session(account: Account) -> Iterator[smtplib.SMTP]:
    with dialled(account.server) as connection:
        session = _session_over(account.server, connection)
        try:
            if account.server.scheme == "smtp+starttls":
                session.starttls(context=tls_context())
            if account.user:
                session.login(account.user, account.password)
            yield session
            with suppress(OSError):  # the server has taken the message
                session.quit()
        finally:
            session.close()


class _Session(smtplib.SMTP):
    """A session over a connection that exists: smtplib would resolve the name again."""

    def __init__(self, host: str, connection: socket.socket) -> None:
        self._connection = connection
        super().__init__(host, local_hostname="dropforge", timeout=LIMIT_SECONDS)

    def _get_socket(self, *_: Any) -> socket.socket:
        return self._connection


def _session_over(server: Server, connection: socket.socket) -> smtplib.SMTP:
    if server.scheme == "smtps":
        connection = tls_context().wrap_socket(connection, server_hostname=server.host)
    return _Session(server.host, connection)


def _reason(error: Exception) -> str:
    """What the server did, without its text, which may repeat an address."""
    code = getattr(error, "smtp_code", "")
    return f"{type(error).__name__} {code}".strip()


def _may_pass(error: Exception) -> bool:
    """Whether the server may take the message later: 4yz (RFC 5321, 4.2.1), or a lost connection."""
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return all(400 <= code < 500 for code, _ in error.recipients.values())
    if isinstance(error, smtplib.SMTPResponseException):
        return 400 <= error.smtp_code < 500
    return isinstance(error, smtplib.SMTPServerDisconnected)
