"""The answers of the entry points: bad events are acknowledged, and only bad requests get 400."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import functions_framework
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropforge.base.errors import Conflict, NotFound
from dropforge.context import Context

from ..platforms.shared import environment

MAIN = Path(__file__).resolve().parents[2] / "functions" / "main.py"
RUN = {"run": "job-0123456789ab", "execution": "e-1"}
STAGES: dict[str, dict[str, Any]] = {
    "provision": {**RUN, "attempt": 1, "callback_url": "http://127.0.0.1:1/"},
    "inspect": {**RUN, "attempt": 1, "callback_url": "http://127.0.0.1:1/"},
    "deploy": RUN,
    "teardown": {**RUN, "scope": "run", "keep_endpoint": False},
}
HEADERS = {
    "ce-id": "1",
    "ce-source": "//pubsub.googleapis.com/projects/p1/topics/requests",
    "ce-specversion": "1.0",
    "ce-type": "test",
}
ENCODED = base64.b64encode(b'{"cancel": "x"}').decode()
MESSAGES: list[Any] = [
    None,
    [],
    "text",
    {},
    {"message": None},
    {"message": {}},
    {"message": {"data": 5, "messageId": "1"}},
    {"message": {"data": "not base64!", "messageId": "1"}},
    {"message": {"data": ENCODED}},
    {"message": {"data": ENCODED, "attributes": [1], "messageId": "1"}},
]
NO_TOPICS = [
    "//test",
    "//storage.googleapis.com/projects/_/buckets/topics",
    "//pubsub.googleapis.com/projects/p1/topics/",
]
UPLOADS: list[Any] = [
    None,
    [],
    "text",
    {},
    {"name": "specs/a.json", "generation": "1"},
    {"bucket": "specs", "generation": "1"},
    {"bucket": "specs", "name": "specs/a.json"},
    {"bucket": "specs", "name": "specs/a.json", "generation": "first"},
    {"bucket": "specs", "name": 5, "generation": "1"},
    {"bucket": "specs", "name": "specs/a.json", "generation": "1", "size": {}},
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=10), values, max_size=3),
    max_leaves=8,
)


def post(name: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    app = functions_framework.create_app(name, str(MAIN))
    data = body if isinstance(body, bytes) else json.dumps(body)
    return app.test_client().post("/", data=data, headers={"Content-Type": "application/json", **(headers or {})})


@pytest.fixture(autouse=True, scope="module")
def deployment() -> Iterator[None]:
    """Set the settings in the environment, because the functions read them first; no test here calls a service."""
    with patch.dict(os.environ, environment("http://127.0.0.1:1", "127.0.0.1:1")):
        yield


@pytest.mark.parametrize("data", MESSAGES, ids=repr)
@pytest.mark.parametrize("name", ["on_spec_message", "on_job_event"])
def test_a_malformed_message_is_acknowledged(name: str, data: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert post(name, data, HEADERS).status_code == 200
    assert "malformed event" in capsys.readouterr().err


@pytest.mark.parametrize("source", NO_TOPICS)
def test_a_request_without_a_topic_is_acknowledged_and_does_nothing(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = {"message": {"data": ENCODED, "messageId": "1"}}
    assert post("on_spec_message", message, {**HEADERS, "ce-source": source}).status_code == 200
    assert "expected a topic" in capsys.readouterr().err


@pytest.mark.parametrize("data", UPLOADS, ids=repr)
def test_a_malformed_upload_is_acknowledged(data: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert post("on_spec_uploaded", data, HEADERS).status_code == 200
    assert "malformed event" in capsys.readouterr().err


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(json_values)
def test_a_job_event_never_causes_a_server_error(data: Any) -> None:
    """Any message of a container is acknowledged, unless it is a complete event."""
    encoded = base64.b64encode(json.dumps(data).encode()).decode()
    assert (
        JOB_EVENTS.post("/", json={"message": {"data": encoded, "messageId": "1"}}, headers=HEADERS).status_code == 200
    )


JOB_EVENTS = functions_framework.create_app("on_job_event", str(MAIN)).test_client()


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(
    "change", [{"run": "../etc"}, {"run": 5}, {"execution": None}, {"execution": ""}, {"execution": 7}], ids=repr
)
def test_a_request_without_a_run_or_a_caller_is_refused(name: str, change: dict[str, Any]) -> None:
    assert post(name, {**STAGES[name], **change}).status_code == 400


@pytest.mark.parametrize(
    "change",
    [
        {"scope": "Run"},
        {"scope": "1"},
        {"scope": True},
        {"scope": None},
        {"scope": []},
        {"keep_endpoint": "false"},
        {"keep_endpoint": 1},
    ],
    ids=repr,
)
def test_a_teardown_with_an_unknown_scope_is_refused(change: dict[str, Any]) -> None:
    """If it passed as the end of an attempt or as permission to keep the endpoint, resources of the run would stay."""
    answer = post("teardown", {**STAGES["teardown"], **change})
    assert answer.status_code == 400
    [(field, value)] = change.items()
    assert f"{field} is {value!r}; expected " in answer.get_json()["error"]


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5"])
def test_a_request_that_is_not_a_json_object_is_refused(name: str, body: bytes) -> None:
    assert post(name, body).status_code == 400


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFound("no such run"), 404),
        (Conflict("it kept changing"), 503),
        (ValueError("a record of a newer version"), 500),
        (KeyError("of our own"), 500),
    ],
    ids=repr,
)
def test_only_an_invalid_request_gets_status_400(
    name: str, error: Exception, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workflow never retries after 400, so a wrong 400 would also skip the teardown."""

    def fail(_: Context) -> Any:
        raise error

    monkeypatch.setattr(Context, "store", property(fail))
    assert post(name, STAGES[name]).status_code == status
