"""What a webhook secret may hold, and what is said of it when it cannot be used: never the value."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest
from google.api_core.exceptions import FailedPrecondition, NotFound, ServiceUnavailable

from dropforge import clients
from dropforge.runs import Record, RunState, Transition
from dropforge.settings import Settings
from dropforge.slack import Message, send, slack_message

SETTINGS = Settings(*["x"] * 12)
CANARY = "CanaryCanary"


def sent(monkeypatch: pytest.MonkeyPatch, secret: bytes | Exception) -> tuple[str, bool]:
    access = Mock(side_effect=secret if isinstance(secret, Exception) else None)
    if isinstance(secret, bytes):
        access.return_value.payload.data = secret
    monkeypatch.setattr(clients, "secrets", lambda: Mock(access_secret_version=access))
    return send("webhook", Message("text", []), SETTINGS)


@pytest.mark.parametrize(
    "value",
    [
        CANARY.encode(),
        f"https://[{CANARY}".encode(),
        f"https://hooks.example/{CANARY}\x01 x".encode(),
        f"https://hooks.example:{CANARY}/".encode(),
        f"ftp://{CANARY}".encode(),
        CANARY.encode() + b"\xff",
        b"",
    ],
)
def test_a_value_that_is_no_webhook_is_told_without_the_value(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: bytes
) -> None:
    problem, may_pass = sent(monkeypatch, value)
    assert "secret 'webhook'" in problem
    assert CANARY not in problem + caplog.text
    assert not may_pass


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (NotFound("deleted"), False),
        (FailedPrecondition("disabled"), False),
        (ServiceUnavailable("away"), True),
        (ConnectionError("reset"), True),
    ],
    ids=repr,
)
def test_a_secret_that_cannot_be_read_is_a_problem_not_an_exception(
    monkeypatch: pytest.MonkeyPatch, error: Any, passes: bool
) -> None:
    import requests

    error = requests.ConnectionError("reset") if isinstance(error, ConnectionError) else error
    problem, may_pass = sent(monkeypatch, error)
    assert "secret 'webhook'" in problem
    assert may_pass is passes


def test_nothing_that_a_spec_says_calls_everybody() -> None:
    problem: dict[str, Any] = {
        "pointer": "/name",
        "message": "wrong",
        "found": "<!channel> & <http://x|y>",
        "expected": "",
    }
    now = datetime(2026, 11, 20, tzinfo=UTC)
    rejected = Record(
        run="job-0123456789ab", name="<!here>", source="s", state=RunState.REJECTED, created=now,
        history=[Transition(state=RunState.REJECTED, time=now)], problems=[problem],
    )  # fmt: skip
    message = slack_message(rejected, None, SETTINGS, now)
    assert message
    marked = [message.text, *(b["text"]["text"] for b in message.blocks[1:] if "text" in b)]
    assert "<" not in "".join(marked)
    assert "&lt;!channel&gt; &amp; &lt;http" in marked[1]
