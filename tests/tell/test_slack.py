"""The valid values of a webhook secret, and the error for an unusable value, which never contains the value."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from google.api_core.exceptions import FailedPrecondition, NotFound, ServiceUnavailable

from dropforge.base.errors import ErrorClass
from dropforge.cloud.clients import Clients
from dropforge.context import Context
from dropforge.run.record import Attempt, Endpoint, RunError, RunState
from dropforge.spec import JobSpec
from dropforge.tell.channel import Failure
from dropforge.tell.slack import Address, Message, message_of, send

from ..deployments import cloud_with
from .stories import NOW, news_of

CANARY = "CanaryCanary"


def sent(secret: bytes | Exception) -> Failure:
    access = Mock(side_effect=secret if isinstance(secret, Exception) else None)
    if isinstance(secret, bytes):
        access.return_value.payload.data = secret
    clients = Clients({})
    clients.secrets = lambda: Mock(access_secret_version=access)  # type: ignore[method-assign]
    news = news_of(RunState.ACCEPTED)
    failure = send(Context(replace(cloud_with(), clients=clients)), Address("webhook"), news)
    assert failure
    return failure


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
def test_the_error_for_an_invalid_webhook_does_not_contain_the_value(
    caplog: pytest.LogCaptureFixture, value: bytes
) -> None:
    for name in logging.root.manager.loggerDict:  # as logging.config.dictConfig does when a server starts
        logging.getLogger(name).disabled = False
    problem, may_pass = sent(value)
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
def test_an_unreadable_secret_is_returned_as_a_problem_not_raised(error: Any, passes: bool) -> None:
    import requests

    error = requests.ConnectionError("reset") if isinstance(error, ConnectionError) else error
    problem, may_pass = sent(error)
    assert "secret 'webhook'" in problem
    assert may_pass is passes


@pytest.mark.parametrize(
    ("status", "passes"),
    [(400, False), (403, False), (404, False), (410, False), (429, True), (500, True), (503, True)],
)
def test_a_webhook_that_refuses_for_good_is_not_asked_again(status: int, passes: bool) -> None:
    """404 and 410: the webhook, or its channel, was deleted."""
    clients = Clients({})
    access = Mock(return_value=Mock(payload=Mock(data=b"https://hooks.example/x")))
    clients.secrets = lambda: Mock(access_secret_version=access)  # type: ignore[method-assign]
    clients.slack = lambda webhook: Mock(send=lambda **_: Mock(status_code=status, body="no_service"))  # type: ignore[method-assign]
    failure = send(Context(replace(cloud_with(), clients=clients)), Address("webhook"), news_of(RunState.ACCEPTED))
    assert failure
    assert (str(status) in failure.problem, failure.may_pass) == (True, passes)


def test_no_text_of_a_spec_mentions_a_whole_channel() -> None:
    problem: dict[str, Any] = {
        "pointer": "/name",
        "message": "wrong",
        "found": "<!channel> & <http://x|y>",
        "expected": "",
    }
    message = message_of(news_of(RunState.REJECTED, name="<!here>", problems=[problem]))
    marked = [message.text, *(b["text"]["text"] for b in message.blocks[1:] if "text" in b)]
    assert "<" not in "".join(marked)
    assert "&lt;!channel&gt; &amp; &lt;http" in marked[1]


def failed(text: str, hint: str = "") -> Message:
    error = RunError(error_class=ErrorClass.CODE, message=text, hint=hint)
    return message_of(news_of(RunState.FAILED, error=error))


def marked_texts(message: Message) -> list[dict[str, Any]]:
    parts = [part for block in message.blocks for part in [block.get("text"), *block.get("elements", ())] if part]
    return [part for part in parts if part["type"] == "mrkdwn"]


def test_slack_links_no_address_channel_or_person_in_a_foreign_text() -> None:
    message = failed("see http://evil.example/x, ask @everyone in #general")
    assert len(marked_texts(message)) >= 2
    assert all(part["verbatim"] is True for part in marked_texts(message))
    foreign, ids = marked_texts(message)
    assert "<" not in foreign["text"]
    assert ids["text"].count("<") == 1, "the link to the run"


@pytest.mark.parametrize("length", range(2980, 3010))
def test_a_long_text_is_cut_between_characters_and_keeps_the_limit(length: int) -> None:
    for part in marked_texts(failed("x" * (length - 12) + "&<>&<>&<>")):
        assert len(part["text"]) <= 3000
        assert re.fullmatch(r"(?s)([^&]|&amp;|&lt;|&gt;)*", part["text"])


def test_a_secret_in_an_error_reaches_no_message_when_the_text_is_cut() -> None:
    token = "glpat-" + "Canary7f3a" * 3
    for before in range(2940, 3000, 3):
        shown = json.dumps(failed("x" * before + token).blocks)
        assert "Canary" not in shown


def test_the_messages_contain_gpus_place_and_expiry_of_an_endpoint() -> None:
    document = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "owner/data"},
        "target": {
            "type": "gke",
            "accelerator": "nvidia-b200",
            "accelerator_count": 8,
            "nodes": 2,
            "placements": [{"region": "us-central1"}],
        },
        "serve": {"type": "gke", "price_usd_per_hour": 10},
        "limits": {"max_cost_usd": 80},
    }
    spec = JobSpec.model_validate_json(json.dumps(document))
    attempt = Attempt(number=1, placement=0, region="us-central1", started=NOW, deadline=NOW)
    endpoint = Endpoint(
        url="http://10.0.0.5:8000", model="n", service="s", region="us-central1", ready=NOW, expires=NOW,
        limit="max_cost_usd",
    )  # fmt: skip
    states = (RunState.ACCEPTED, RunState.TRAINING, RunState.SUCCEEDED)
    messages = [message_of(news_of(state, spec, attempts=[attempt], endpoint=endpoint)) for state in states]
    texts = [json.dumps(message.blocks) for message in messages]
    assert "8.0 h of the endpoint" in texts[0]
    assert "attempt 1 on 16 x nvidia-b200 in us-central1" in texts[1]
    address = "http://10.0.0.5:8000/v1"
    assert f"<{address}|{address}>, inside the VPC only, until" in texts[2]
    assert "when the budget is used up" in texts[2]


# The test stops a thread during its import of slack_sdk, after slack_sdk.errors; a second thread sends. The script
# prints the modules that the second thread then begins to import.
_TWO_SENDERS = """
import sys, threading
from dropforge.cloud.clients import Clients
from dropforge.context import Context
from dropforge.cloud.context import Cloud
from dropforge.tell import slack

held, go, early = threading.Event(), threading.Event(), []

def hold(event, arguments):
    name = arguments[0] if event == "import" else ""
    if threading.current_thread().name == "first" and name == "slack_sdk.web.slack_response":
        held.set()
        go.wait(60)
    if threading.current_thread().name == "second" and name.startswith("slack_sdk.") and not go.is_set():
        early.append(name)

sys.addaudithook(hold)
cloud = Cloud(None, Clients({}))
def send():
    slack._send(cloud, "s", "no URL", slack.Message("", []))

first, second = (threading.Thread(target=send, name=name) for name in ("first", "second"))
first.start()
assert held.wait(60)
second.start()
second.join(1)
go.set()
first.join()
second.join()
print(early)
"""


def test_a_sender_waits_until_another_thread_has_imported_the_sdk() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", _TWO_SENDERS], capture_output=True, text=True, timeout=110)
    assert (done.stdout, done.stderr) == ("[]\n", "")
