"""The Slack sink with slack_sdk's webhook client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slack_sdk.webhook import WebhookClient

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Server
from dropforge_local.emulators.slack import SlackSink


def build(path: Path) -> list[SlackSink]:
    return [SlackSink(Database(path), SystemClock())]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with BackgroundServer(lambda: build(tmp_path / "state.db")) as server:
        yield server


@pytest.fixture
def webhook(server: Server) -> WebhookClient:
    return WebhookClient(f"{server.url}/slack/services/T0/B0/very-secret")


def posted(server: Server) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = requests.get(f"{server.url}/slack/messages", timeout=60).json()["messages"]
    return messages


def section(text: str, kind: str = "mrkdwn") -> dict[str, Any]:
    return {"type": "section", "text": {"type": kind, "text": text}}


def test_message_is_recorded_with_its_time_and_without_the_secret(server: Server, webhook: WebhookClient) -> None:
    blocks = [
        {"type": "header", "text": {"type": "plain_text", "text": "Run succeeded"}},
        {**section("*gemma*"), "fields": [{"type": "mrkdwn", "text": "cost: 1 USD"}]},
        {"type": "context", "elements": [{"type": "mrkdwn", "text": "logs", "verbatim": True}]},
        {"type": "divider"},
        {
            "type": "actions",
            "elements": [{"type": "button", "text": {"type": "plain_text", "text": "Open"}, "url": "http://x"}],
        },
    ]
    answer = webhook.send(text="fallback", blocks=blocks)
    assert (answer.status_code, answer.body) == (200, "ok")
    (message,) = posted(server)
    assert message["payload"] == {"text": "fallback", "blocks": blocks}
    assert (message["webhook"], message["time"][-1]) == ("T0/B0", "Z")
    assert "very-secret" not in str(message)


def test_messages_survive_a_restart(tmp_path: Path) -> None:
    for count in (1, 2):
        with BackgroundServer(lambda: build(tmp_path / "state.db")) as server:
            WebhookClient(f"{server.url}/slack/services/T/B/X").send(text=f"message {count}")
            assert [message["payload"]["text"] for message in posted(server)] == ["message 1", "message 2"][:count]


def test_the_list_may_be_of_the_messages_with_a_text(server: Server, webhook: WebhookClient) -> None:
    for number in (1, 2, 12):
        webhook.send(text="a message", blocks=[section(f"about `run-{number}`")])
    found = requests.get(f"{server.url}/slack/messages", {"containing": "run-12"}, timeout=60).json()["messages"]
    assert [message["payload"]["blocks"] for message in found] == [[section("about `run-12`")]]


@pytest.mark.parametrize(
    ("payload", "word"),
    [
        ({"mrkdwn": True}, "no_text"),
        ({"text": ""}, "no_text"),
        ({"text": 5}, "invalid_payload"),
        ({"text": "x", "blocks": "x"}, "invalid_blocks_format"),
        ({"blocks": [{"type": "divider"}] * 51}, "invalid_blocks"),
        ({"blocks": [section("x" * 3001)]}, "invalid_blocks"),
        ({"blocks": [section("")]}, "invalid_blocks"),
        ({"blocks": [section("x", "html")]}, "invalid_blocks"),
        ({"blocks": [{"type": "section"}]}, "invalid_blocks"),
        ({"blocks": [{"type": "section", "fields": [{"type": "mrkdwn", "text": "x"}] * 11}]}, "invalid_blocks"),
        ({"blocks": [{"type": "header", "text": {"type": "plain_text", "text": "x" * 151}}]}, "invalid_blocks"),
        ({"blocks": [{"type": "header", "text": {"type": "mrkdwn", "text": "x"}}]}, "invalid_blocks"),
        (
            {"blocks": [{"type": "header", "text": {"type": "plain_text", "text": "x", "verbatim": True}}]},
            "invalid_blocks",
        ),
        ({"blocks": [{"type": "section", "text": {"type": "mrkdwn", "text": "x", "verbatim": 1}}]}, "invalid_blocks"),
        ({"blocks": [{"type": "banner"}]}, "invalid_blocks"),
        ({"blocks": [{"type": "divider", "block_id": "a"}, {"type": "divider", "block_id": "a"}]}, "invalid_blocks"),
        ({"blocks": [{"type": "actions", "elements": [{"type": "button"}]}]}, "invalid_blocks"),
        ({"blocks": [{"type": "image", "image_url": "http://x"}]}, "invalid_blocks"),
        ({"attachments": [{"text": "x"}] * 101}, "too_many_attachments"),
    ],
)
def test_invalid_payloads_are_refused(
    server: Server, webhook: WebhookClient, payload: dict[str, Any], word: str
) -> None:
    answer = webhook.send_dict(payload)
    assert (answer.status_code, answer.body) == (400, word)
    assert posted(server) == []


def test_payload_at_the_limits_is_accepted(webhook: WebhookClient) -> None:
    blocks = [
        section("x" * 3000),
        {"type": "header", "text": {"type": "plain_text", "text": "x" * 150}},
        *[{"type": "divider"}] * 48,
    ]
    assert webhook.send(blocks=blocks).status_code == 200


def test_outage_lasts_for_the_requested_number_of_posts(server: Server, webhook: WebhookClient) -> None:
    assert requests.post(f"{server.url}/slack/_fail", json={"count": 2, "status": 429}, timeout=60).ok
    answers = [webhook.send(text=str(number)) for number in range(3)]
    assert [answer.status_code for answer in answers] == [429, 429, 200]
    assert answers[0].headers["Retry-After"] == "1"
    assert [message["payload"]["text"] for message in posted(server)] == ["2"]


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"count": -1}', '{"count": true}', '{"count": 1, "status": 200}'])
def test_malformed_switch_is_refused(server: Server, body: str) -> None:
    assert requests.post(f"{server.url}/slack/_fail", data=body, timeout=60).status_code == 400


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b"\xff\xfe", b"[" * 100_000, b"payload=nope"])
def test_body_without_a_json_object_is_invalid_payload(server: Server, body: bytes) -> None:
    answer = requests.post(f"{server.url}/slack/services/T/B/X", data=body, timeout=60)
    assert (answer.status_code, answer.text) == (400, "invalid_payload")


def test_form_encoded_payload(server: Server) -> None:
    requests.post(f"{server.url}/slack/services/T/B/X", data={"payload": '{"text": "old form"}'}, timeout=60)
    assert posted(server)[0]["payload"] == {"text": "old form"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "elements", "fields", "block_id", "accessory", "blocks", "title", "url"]),
            inner,
        )
    ),
    max_leaves=12,
)
TYPES = st.sampled_from(["section", "header", "context", "actions", "image", "markdown", "rich_text", "button"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON, TYPES, JSON)
def test_no_payload_is_a_server_error(server: Server, blocks: Any, kind: str, rest: Any) -> None:
    block = {**rest, "type": kind} if isinstance(rest, dict) else {"type": kind, "elements": rest, "text": rest}
    for payload in ({"blocks": blocks}, {"blocks": [block]}, {"attachments": blocks}, blocks):
        answer = requests.post(f"{server.url}/slack/services/T/B/X", json=payload, timeout=60)
        assert answer.status_code in (200, 400), answer.text
