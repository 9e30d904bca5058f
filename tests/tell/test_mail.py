"""E-mail through a real SMTP server with TLS, which refuses what mail servers refuse."""

from __future__ import annotations

import email
import email.policy
import ssl
from collections.abc import Iterator
from email.message import EmailMessage
from pathlib import Path

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from dropforge.base.errors import ErrorClass
from dropforge.context import Context
from dropforge.run.record import Notice, RunError, RunState
from dropforge.tell.channel import Failure
from dropforge.tell.mail import Address, address_of, send
from dropforge.tell.news import News, notice_news
from dropforge.tell.outgoing import Refused
from dropforge.tell.smtp import account_of, message_of

from ..deployments import SETTINGS
from .mail_server import MailServer
from .stories import NOW, RUN, context_at, news_of, record_of, spec_of

USER, PASSWORD = "runs@example.com", "Canary:p@ss/word%"
CREDENTIALS = "runs%40example.com:Canary%3Ap%40ss%2Fword%25"
TO = ("good@example.com", "team@example.org")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


@pytest.fixture
def trusted(authority: trustme.CA, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))


@pytest.fixture
def server(context: ssl.SSLContext, trusted: None) -> Iterator[MailServer]:
    with MailServer(context, users={USER: PASSWORD}) as server:
        yield server


def at(server: MailServer, scheme: str = "smtp+starttls", credentials: str = CREDENTIALS) -> Context:
    host = f"localhost:{server.port}"
    return context_at({"SMTP_EMULATOR_HOST": host}, mail=f"{scheme}://{credentials}@{host}")


def sent(context: Context, news: News | None = None, to: tuple[str, ...] = TO) -> Failure | None:
    return send(context, Address("mail", to), news or news_of(RunState.FAILED))


def failed(context: Context) -> Failure:
    failure = sent(context)
    assert failure
    assert "secret 'mail'" in failure.problem
    assert not any(word in failure.problem for word in ("Canary", "runs@", "@example"))
    return failure


def parsed(mail: bytes) -> EmailMessage:
    message = email.message_from_bytes(mail, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    return message


@pytest.mark.parametrize("scheme", ["smtp+starttls", "smtps"])
def test_a_message_arrives_by_tls_after_a_login(context: ssl.SSLContext, trusted: None, scheme: str) -> None:
    news = news_of(RunState.FAILED, error=RunError(error_class=ErrorClass.CODE, message="größer than ü\n.\nQUIT"))
    with MailServer(context, is_tls=scheme == "smtps", users={USER: PASSWORD}) as server:
        assert sent(at(server, scheme), news) is None
    assert server.recipients == list(TO)
    [mail] = server.mails
    message = parsed(mail)
    assert message["Subject"] == "[dropforge] n failed: code (0123456789ab)"
    assert message["From"] == f"dropforge <{USER}>"
    assert message["To"] == ", ".join(TO)
    assert message.get_content_type() == "text/plain"
    assert message.get_content().splitlines()[:2] == [news.title, "why: größer than ü . QUIT"]


def test_the_mails_of_a_run_are_a_conversation_and_a_repeated_mail_has_its_id(server: MailServer) -> None:
    notice = notice_news(record_of(RunState.TRAINING), Notice("budget-50", "has used 50 %", "text"), SETTINGS, NOW)
    for news in (notice, notice, news_of(RunState.FAILED)):
        assert sent(at(server), news) is None
    messages = list(map(parsed, server.mails))
    assert {message["References"] for message in messages} == {f"<{RUN}@example.com>"}
    ids = [message["Message-ID"] for message in messages]
    assert ids == [f"<{RUN}.notice.budget-50@example.com>"] * 2 + [f"<{RUN}.0.failed@example.com>"]


def test_a_wrong_password_is_not_tried_again(server: MailServer) -> None:
    failure = failed(at(server, credentials="runs%40example.com:Canary"))
    assert ("535" in failure.problem, failure.may_pass) == (True, False)
    assert server.mails == []


def test_no_password_travels_without_tls(server: MailServer) -> None:
    server.starttls = False
    failure = failed(at(server))
    assert "SMTPNotSupportedError" in failure.problem
    assert not failure.may_pass
    assert "AUTH" not in server.commands


def test_a_server_with_an_unknown_certificate_gets_no_password(context: ssl.SSLContext) -> None:
    for is_tls, scheme in ((False, "smtp+starttls"), (True, "smtps")):
        with MailServer(context, is_tls=is_tls, users={USER: PASSWORD}) as server:
            failure = failed(at(server, scheme))
        assert ("certificate is not valid" in failure.problem, failure.may_pass) == (True, False)
        assert "AUTH" not in server.commands


@pytest.mark.parametrize(
    ("command", "answer", "may_pass"),
    [
        ("CONNECT", "421 too busy", True),
        ("CONNECT", "554 no service", False),
        ("AUTH", "454 temporary authentication failure", True),
        ("MAIL", "451 try later", True),
        ("MAIL", "550 not yours Canary runs@example.com", False),
        ("DATA", "452 full", True),
        ("END", "554 spam", False),
        ("END", "451 greylisted", True),
        ("MAIL", "", True),
    ],
)
def test_a_temporary_refusal_may_pass(server: MailServer, command: str, answer: str, may_pass: bool) -> None:
    server.answers[command] = answer
    assert failed(at(server)).may_pass is may_pass
    server.answers.clear()
    assert sent(at(server)) is None


def test_a_server_that_leaves_after_it_took_the_message_is_no_failure(server: MailServer) -> None:
    server.answers["QUIT"] = ""
    assert sent(at(server)) is None


@pytest.mark.parametrize(("answer", "may_pass"), [("550 no such user", False), ("450 try later", True)])
def test_addresses_that_are_all_refused(server: MailServer, answer: str, may_pass: bool) -> None:
    server.answers["RCPT"] = answer
    failure = sent(at(server), to=("one@example.com", "two@example.com"))
    assert failure
    assert failure.may_pass is may_pass
    assert "@" not in failure.problem
    assert server.mails == []


def test_a_message_that_some_addresses_got_is_not_sent_again(server: MailServer) -> None:
    server.answers["RCPT"] = "450 try later"
    failure = failed(at(server))
    assert ("refused 1 of 2 addresses" in failure.problem, failure.may_pass) == (True, False)
    assert len(server.mails) == 1


@pytest.mark.parametrize(
    "url",
    [
        "", "Canary", "https://Canary@mail.example.com", "smtp://runs%40example.com:Canary@mail.example.com",
        "smtps://Canary@mail.example.com", "smtps://:Canary@mail.example.com", "smtps://a:Canary@[mail",
        "smtps://runs%40example.com:Canary@mail.example.com:port", "smtps://x:Canary@mail.example.com?from=a%0D%0ABcc:b",
        "smtps://runs%40example.com:Canary%FF@mail.example.com", "smtps://x:Canary@mail.example.com?from=%40",
        "smtps://runs%40example.com:Canary@127.0.0.1", "smtp+starttls://runs%40example.com:Canary@10.0.0.5",
        "smtps://runs%40example.com:Canary@metadata.google.internal",
    ],
)  # fmt: skip
def test_what_is_no_mail_server_on_the_internet_is_refused_without_its_text(url: str) -> None:
    failure = failed(context_at({}, mail=url))
    assert not failure.may_pass


def test_a_sender_may_differ_from_the_user() -> None:
    account = account_of("smtps://apikey:x@mail.example.com?from=runs%40example.org")
    assert (account.user, account.sender.addr_spec, account.server.port) == ("apikey", "runs@example.org", 465)
    with pytest.raises(Refused):
        account_of("smtps://apikey:x@mail.example.com")


hostile = st.text(max_size=40) | st.sampled_from(["x\r\nBcc: all@example.com", "\r\n.\r\nMAIL FROM:<x>", "\ud800"])


@settings(max_examples=100, deadline=None)
@given(name=hostile, text=hostile)
def test_no_name_and_no_text_adds_a_header_or_a_recipient(name: str, text: str) -> None:
    error = RunError(error_class=ErrorClass.CODE, message=text, hint=text)
    sender = account_of("smtps://runs%40example.com:x@mail.example.com").sender
    message = message_of(news_of(RunState.FAILED, name=name, error=error), sender, TO)
    again = parsed(bytes(message))
    own = {"Subject", "From", "To", "Date", "Message-ID", "References", "Auto-Submitted"}
    assert own <= set(again.keys()) <= own | {"Content-Type", "Content-Transfer-Encoding", "MIME-Version"}
    assert again["To"] == ", ".join(TO)


def test_a_spec_names_the_server_and_the_people() -> None:
    spec = spec_of(notify={"email": {"server_secret": "mail", "to": list(TO)}})
    assert address_of(spec, SETTINGS) == Address("mail", TO)
    assert address_of(None, SETTINGS) is None
