"""Webhooks, Teams and GitHub against emulators that refuse what the services refuse."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropforge.base.errors import ErrorClass
from dropforge.context import Context
from dropforge.run.record import Notice, RunError, RunState
from dropforge.tell import github, teams, webhook
from dropforge.tell.channel import Channel
from dropforge.tell.channels import CHANNELS, secrets_of
from dropforge.tell.news import News, notice_news
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.channels import ChannelSink
from dropforge_local.emulators.channels.emulator import MISSING, TOKEN

from ..deployments import SETTINGS
from .stories import NOW, RUN, context_at, news_of, record_of, spec_of

KEY = b"k" * 24
SIGNING = f"whsec_{base64.b64encode(KEY).decode()}"
SHA = "0123456789abcdef0123456789abcdef01234567"
NOTIFY = {
    "webhook": {"url_secret": "hook", "signing_secret": "signing"},
    "teams": {"webhook_secret": "teams"},
    "github": {"repository": "owner/name", "sha": SHA, "token_secret": "github"},
}
SENDERS: dict[str, Channel] = {"webhook": webhook, "teams": teams, "github": github}


class Services:
    def __init__(self, url: str) -> None:
        self.url = url

    def context(self, **secrets: str) -> Context:
        own = {
            "hook": f"{self.url}/channels/webhook/Canary",
            "signing": SIGNING,
            "teams": f"{self.url}/channels/teams/Canary",
            "github": f"{TOKEN}Canary",
        }
        environment = {"WEBHOOK_EMULATOR_HOST": self.url, "GITHUB_EMULATOR_HOST": f"{self.url}/channels/github"}
        return context_at(environment, datetime.now(UTC), **{**own, **secrets})

    def fail_next(self, status: int) -> None:
        requests.post(f"{self.url}/channels/_fail", json={"count": 1, "status": status}, timeout=60)

    @property
    def messages(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = requests.get(f"{self.url}/channels/messages", timeout=60).json()["messages"]
        return listed


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with BackgroundServer(lambda: [ChannelSink(Database(tmp_path / "state.db"), SystemClock())]) as server:
        yield Services(server.url)


def send(name: str, context: Context, news: News, **notify: Any) -> Any:
    address = SENDERS[name].address_of(spec_of(notify={**NOTIFY, **notify}), SETTINGS)
    assert address is not None
    return SENDERS[name].send(context, address, news)


def a_notice() -> News:
    return notice_news(record_of(RunState.TRAINING), Notice("budget-50", "has used 50 %", "text"), SETTINGS, NOW)


def test_a_webhook_gets_the_run_event_with_a_signature_that_a_receiver_can_check(services: Services) -> None:
    news = news_of(RunState.FAILED, error=RunError(error_class=ErrorClass.CODE, message="m"))
    assert send("webhook", services.context(), news) is None
    [message] = services.messages
    event, headers = json.loads(message["body"]), message["headers"]
    assert (event["id"], event["state"], event["details"]["error"]["message"]) == (f"{RUN}/0/failed", "FAILED", "m")
    assert headers["webhook-id"] == event["id"]
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.{message['body']}".encode()
    expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"


def test_the_signature_is_that_of_the_reference_libraries() -> None:
    """The example of https://docs.svix.com/receiving/verifying-payloads/how-manual, from which the standard comes."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = webhook.signature_headers([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_repeated_event_has_the_same_id_and_two_keys_sign_during_a_change(services: Services) -> None:
    context = services.context(signing=f"{SIGNING} {base64.b64encode(b'n' * 64).decode()}\n")
    for _ in range(2):
        assert send("webhook", context, news_of(RunState.FAILED)) is None
    headers = [message["headers"] for message in services.messages]
    assert [h["webhook-id"] for h in headers] == [f"{RUN}/0/failed"] * 2
    assert all(h["webhook-signature"].count("v1,") == 2 for h in headers)


@pytest.mark.parametrize("key", ["", "Canary", "whsec_", "whsec_Q2FuYXJ5", f"{SIGNING} Canary!", "whsec_" + "A" * 88])
def test_what_is_no_signing_key_sends_nothing(services: Services, key: str) -> None:
    problem, may_pass = send("webhook", services.context(signing=key), news_of(RunState.FAILED))
    assert "secret 'signing' holds no signing key" in problem
    assert "Canary" not in problem
    assert not may_pass
    assert services.messages == []


def test_teams_gets_a_card_without_markup_of_a_foreign_text(services: Services) -> None:
    hostile = "[click](https://evil.example) <at>everyone</at> **x**"
    news = news_of(RunState.FAILED, name=hostile, error=RunError(error_class=ErrorClass.CODE, message=hostile))
    assert send("teams", services.context(), news) is None
    [attachment] = json.loads(services.messages[0]["body"])["attachments"]
    assert {element["type"] for element in attachment["content"]["body"]} == {"RichTextBlock"}
    assert "entities" not in json.dumps(attachment)


@pytest.mark.parametrize(
    ("state", "error_class", "expected"),
    [
        (RunState.ACCEPTED, None, "pending"),
        (RunState.TRAINING, None, "pending"),
        (RunState.SUCCEEDED, None, "success"),
        (RunState.FAILED, ErrorClass.GATE, "failure"),
        (RunState.FAILED, ErrorClass.STOCKOUT, "error"),
        (RunState.CANCELLED, ErrorClass.CANCELLED, "error"),
    ],
)
def test_github_shows_the_state_of_the_run(
    services: Services, state: RunState, error_class: ErrorClass | None, expected: str
) -> None:
    error = RunError(error_class=error_class, message="long " * 90) if error_class else None
    attempts = [{"number": 1, "placement": 0, "region": "r", "started": NOW, "deadline": NOW}]
    assert send("github", services.context(), news_of(state, error=error, attempts=attempts)) is None
    status = json.loads(services.messages[0]["body"])
    assert (status["state"], status["context"]) == (expected, "dropforge/n")
    assert len(status["description"]) <= 140
    assert status["description"].startswith("n ")


def test_a_notice_changes_no_status(services: Services) -> None:
    assert send("github", services.context(), a_notice()) is None
    assert services.messages == []


@pytest.mark.parametrize("name", list(SENDERS))
@pytest.mark.parametrize(("status", "may_pass"), [(400, False), (404, False), (410, False), (429, True), (503, True)])
def test_only_a_limit_and_an_outage_may_pass(services: Services, name: str, status: int, may_pass: bool) -> None:
    services.fail_next(status)
    failure = send(name, services.context(), news_of(RunState.FAILED))
    assert (str(status) in failure.problem, failure.may_pass) == (True, may_pass)
    assert "Canary" not in failure.problem
    assert send(name, services.context(), news_of(RunState.FAILED)) is None


def test_github_refuses_another_token_and_an_unknown_repository(services: Services) -> None:
    wrong = send("github", services.context(github="Canary"), news_of(RunState.FAILED))
    unknown = {**NOTIFY["github"], "repository": f"{MISSING}/name"}
    missing = send("github", services.context(), news_of(RunState.FAILED), github=unknown)
    malformed = send("github", services.context(github="Canary\r\nX: y"), news_of(RunState.FAILED))
    assert ("401" in wrong.problem, "404" in missing.problem) == (True, True)
    assert "does not hold a token" in malformed.problem
    assert not any(f.may_pass or "Canary" in f.problem for f in (wrong, missing, malformed))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(foreign=st.text(max_size=30).map(lambda text: text * 200))
def test_the_largest_message_is_accepted_everywhere(services: Services, foreign: str) -> None:
    foreign = foreign.encode(errors="replace").decode()
    error = RunError(error_class=ErrorClass.OUT_OF_MEMORY, message=foreign, hint=foreign)
    news = news_of(RunState.FAILED, name=foreign, error=error)
    for name in SENDERS:
        assert send(name, services.context(), news) is None


@pytest.mark.parametrize("name", list(SENDERS))
def test_a_secret_that_does_not_exist_is_a_failure(services: Services, name: str) -> None:
    context = context_at({})
    problem, may_pass = send(name, context, news_of(RunState.FAILED))
    assert "cannot be read" in problem
    assert not may_pass


def test_admission_looks_for_every_secret_of_every_channel() -> None:
    notify = {
        **NOTIFY,
        "slack": {"webhook_secret": "slack"},
        "email": {"server_secret": "mail", "to": ["me@example.com"]},
    }
    assert secrets_of(spec_of(notify=notify)) == {
        "/notify/slack/webhook_secret": "slack",
        "/notify/webhook/url_secret": "hook",
        "/notify/webhook/signing_secret": "signing",
        "/notify/teams/webhook_secret": "teams",
        "/notify/email/server_secret": "mail",
        "/notify/github/token_secret": "github",
    }


def test_no_channel_but_slack_is_configured_by_the_deployment() -> None:
    assert [channel.NAME for channel in CHANNELS if channel.address_of(None, SETTINGS) is not None] == []
