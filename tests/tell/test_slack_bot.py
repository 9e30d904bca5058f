"""A bot keeps a run's messages in one thread, against the emulator of chat.postMessage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from dropforge.base import names
from dropforge.context import Context
from dropforge.run.record import Notice, RunState
from dropforge.tell.news import News, notice_news
from dropforge.tell.slack import Address, secrets_of, send
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.slack import SlackSink
from dropforge_local.emulators.slack.emulator import CHANNEL

from ..deployments import SETTINGS
from .stories import NOW, RUN, context_at, news_of, record_of, spec_of

BOT = Address("bot", CHANNEL)
TOKEN = "xoxb-Canary-Canary"


class Workspace:
    def __init__(self, url: str) -> None:
        self.url = url

    def fail_next(self, count: int, status: int) -> None:
        requests.post(f"{self.url}/slack/_fail", json={"count": count, "status": status}, timeout=60)

    def context(self, token: str = TOKEN) -> Context:
        return context_at({"SLACK_EMULATOR_HOST": self.url}, bot=token)

    @property
    def messages(self) -> list[dict[str, Any]]:
        listed = requests.get(f"{self.url}/slack/messages", timeout=60).json()["messages"]
        return [message["payload"] for message in listed]

    @property
    def threads(self) -> list[tuple[str, bool]]:
        """The thread of each message, and whether the channel shows it, too."""
        return [(m.get("thread_ts", ""), m.get("reply_broadcast", False)) for m in self.messages]


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    with BackgroundServer(lambda: [SlackSink(Database(tmp_path / "state.db"), SystemClock())]) as server:
        yield Workspace(server.url)


def a_notice() -> News:
    return notice_news(record_of(RunState.TRAINING), Notice("budget-50", "has used 50 %", "text"), SETTINGS, NOW)


def test_the_messages_of_a_run_are_one_thread_and_the_channel_shows_notices_and_the_end(workspace: Workspace) -> None:
    context = workspace.context()
    for news in (news_of(RunState.ACCEPTED), news_of(RunState.ACCEPTED), a_notice(), news_of(RunState.FAILED)):
        assert send(context, BOT, news) is None
    first = "1700000000.000001"
    assert workspace.threads == [("", False), (first, False), (first, True), (first, True)]
    assert json.loads(context.store.read(names.slack_object(RUN)).data) == {"channel": CHANNEL, "ts": first}


def test_two_first_messages_at_once_are_both_there_and_later_messages_follow_one(workspace: Workspace) -> None:
    context = workspace.context()
    read = context.store.read

    def read_before_the_other_message(name: str) -> Any:
        """Another function sends and notes its first message after this function has looked for a thread."""
        context.store.read = read  # type: ignore[method-assign]
        with pytest.raises(Exception, match="does not exist") as missing:
            read(name)
        assert send(context, BOT, news_of(RunState.ACCEPTED)) is None
        raise missing.value

    context.store.read = read_before_the_other_message  # type: ignore[method-assign]
    assert send(context, BOT, a_notice()) is None
    assert send(context, BOT, news_of(RunState.FAILED)) is None
    assert workspace.threads == [("", False), ("", False), ("1700000000.000001", True)]


def test_a_thread_that_a_user_deleted_is_left(workspace: Workspace) -> None:
    context = workspace.context()
    context.store.put_new(names.slack_object(RUN), json.dumps({"channel": CHANNEL, "ts": "1.2"}).encode())
    assert send(context, BOT, news_of(RunState.FAILED)) is None
    assert workspace.threads == [("", False)]


@pytest.mark.parametrize("noted", [b"", b"[]", b'"x"', b"\xff", b'{"channel": "C0OTHER000", "ts": "1.2"}'])
def test_a_malformed_note_of_the_thread_loses_no_message(workspace: Workspace, noted: bytes) -> None:
    context = workspace.context()
    context.store.put_new(names.slack_object(RUN), noted)
    assert send(context, BOT, news_of(RunState.FAILED)) is None
    assert workspace.threads == [("", False)]


@pytest.mark.parametrize(
    ("token", "channel", "word"),
    [("wrong-Canary", CHANNEL, "invalid_auth"), (TOKEN, "C0UNKNOWN0", "channel_not_found")],
)
def test_what_slack_refuses_is_not_tried_again(
    workspace: Workspace, token: str, channel: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    failure = send(workspace.context(token), Address("bot", channel), news_of(RunState.FAILED))
    assert failure
    assert word in failure.problem
    assert "secret 'bot'" in failure.problem
    assert not failure.may_pass
    assert "Canary" not in failure.problem + caplog.text


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_limit_or_an_outage_of_slack_may_pass(workspace: Workspace, status: int) -> None:
    workspace.fail_next(1, status)
    context = workspace.context()
    failure = send(context, BOT, news_of(RunState.FAILED))
    assert failure
    assert failure.may_pass, failure
    assert str(status) in failure.problem
    assert send(context, BOT, news_of(RunState.FAILED)) is None


def test_a_slack_that_cannot_be_reached_may_be_reached_later() -> None:
    failure = send(context_at({"SLACK_EMULATOR_HOST": "http://127.0.0.1:9"}, bot=TOKEN), BOT, news_of(RunState.FAILED))
    assert failure
    assert failure.may_pass
    assert "could not be reached" in failure.problem


@pytest.mark.parametrize("token", ["xoxb-\n\x01Canary", "Canary\xff", "Canary \r\nX-Header: y", ""])
def test_a_token_that_no_header_can_hold_is_a_failure_without_the_value(
    workspace: Workspace, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    failure = send(workspace.context(token), BOT, news_of(RunState.FAILED))
    assert failure
    assert not failure.may_pass
    assert "Canary" not in failure.problem + caplog.text


def test_admission_looks_for_the_secret_of_the_bot() -> None:
    spec = spec_of(notify={"slack": {"token_secret": "bot", "channel": CHANNEL}})
    assert secrets_of(spec) == {"/notify/slack/token_secret": "bot"}
