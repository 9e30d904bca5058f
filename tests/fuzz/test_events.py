"""No input makes a function fail with 5xx if the sender would repeat the same input: events, stages, callbacks."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.run.proof import EVENT_NAME, PROOF, proof
from dropforge.run.record import Record, RunState, Transition

from .conftest import EVENT, RUNS, WORKFLOW, App
from .documents import mutated, odd_values

QUIET = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
EVENTS = ["on_spec_uploaded", "on_spec_message", "on_job_event"]
STAGES = ["provision", "inspect", "deploy", "teardown"]
NOBODY = "nobody-0123456789ab"
REQUEST = {"run": NOBODY, "execution": "e-1", "attempt": 1, "callback_url": "http://127.0.0.1:1/", "scope": "run"}
ERROR = {"error_class": "code", "message": "m", "hint": ""}
REQUEST |= {"keep_endpoint": False, "outcome": {"state": "FAILED", "error": ERROR}}
MESSAGE = {"message": {"data": "e30=", "messageId": "1", "attributes": {"idempotency_key": "k"}}, "subscription": "s"}
UPLOAD = {"bucket": RUNS, "name": "specs/a.json", "generation": "1", "size": "2"}
ODD_HEADERS = [
    "",
    "é".encode().decode("latin-1"),
    "x" * 8000,
    "text/html; charset=utf-7",
]
# The four mandatory headers stay, and the body stays JSON that Python can read. functions-framework 3.10 itself answers
# 500 to anything else before dropforge sees the request; Eventarc sends no such request.
headers = st.dictionaries(
    st.sampled_from(["ce-time", "ce-subject", "ce-dataschema", "Content-Type", "ce-x"]),
    st.sampled_from([*ODD_HEADERS, *EVENT.values(), "2026-13-45T99:00:00Z", "application/json"]),
)
DEEP = b"[" * 100_000 + b"]" * 100_000
bodies = st.one_of(
    odd_values.map(lambda value: json.dumps(value).encode()),
    mutated([MESSAGE, UPLOAD]).map(lambda value: json.dumps(value).encode()),
    st.sampled_from([b"", b"\xff\xfe", b"{", b"NaN", b'{"message": {"messageId": "1", "data": "\\ud800"}}']),
    st.binary(max_size=20),
)


@pytest.fixture(scope="module")
def run(app: App) -> str:
    """An accepted run."""
    run, now = "fuzzed-0123456789ab", utc_now()
    history = [Transition(state=RunState.ACCEPTED, time=now)]
    record = Record(run=run, name="n", source="test", state=RunState.ACCEPTED, created=now, history=history)
    app.store.create(record)
    return run


@settings(QUIET, max_examples=80)
@given(st.sampled_from(EVENTS), bodies, headers)
def test_no_cloud_event_makes_a_function_fail(app: App, name: str, body: bytes, more: dict[str, str]) -> None:
    status = app.post(name, body, {"Content-Type": "application/json", **EVENT, **more})
    assert status < 500


@settings(QUIET, max_examples=60)
@given(st.sampled_from(EVENTS), mutated([MESSAGE, UPLOAD]) | odd_values)
def test_no_structured_cloud_event_makes_a_function_fail(app: App, name: str, data: Any) -> None:
    event = {"specversion": "1.0", "id": "1", "source": "//test", "type": "test", "data": data}
    assert app.post(name, event, {"Content-Type": "application/cloudevents+json"}) < 500


@pytest.mark.parametrize("body", [DEEP, b'{"message":' + DEEP + b"}", b"9" * 5000, b" " * 9_000_000], ids=len)
@pytest.mark.parametrize("name", STAGES)
def test_a_huge_or_deep_body_is_a_bad_request(app: App, name: str, body: bytes) -> None:
    assert app.post(name, body) == 400


@settings(QUIET, max_examples=100)
@given(st.sampled_from(EVENTS), mutated([MESSAGE, UPLOAD]))
def test_a_malformed_message_is_acknowledged(app: App, name: str, body: Any) -> None:
    assert app.post(name, body, {"Content-Type": "application/json", **EVENT}) == 200


@settings(QUIET, max_examples=100)
@given(data=st.data())
def test_no_job_event_makes_a_function_fail_or_ends_a_run(app: App, run: str, data: st.DataObject) -> None:
    event = {"type": "failed", "run": run, "attempt": 1, "sequence": 1, "time": "2026-01-01T00:00:00Z"}
    saved = {"type": "checkpoint", "step": 1, "uri": "gs://b/c"}
    more: list[dict[str, Any]] = [{"error_class": "code", "message": "m"}, saved]
    body = data.draw(mutated([{**event, **fields} for fields in more]))
    before = app.store.record(run)
    content = json.dumps(body).encode()
    attributes = {PROOF: proof(app.store.key(run), EVENT_NAME, content)}
    message = {"message": {"data": base64.b64encode(content).decode(), "messageId": "1", "attributes": attributes}}
    assert app.post("on_job_event", message, {"Content-Type": "application/json", **EVENT}) == 200
    assert app.store.record(run) == before


@settings(QUIET, max_examples=80)
@given(st.sampled_from(STAGES), mutated([REQUEST]) | odd_values)
def test_a_bad_request_to_a_stage_is_400_or_404(app: App, name: str, body: Any) -> None:
    """The run is unknown, or the request is malformed. The workflow repeats a request after a 5xx."""
    assert app.post(name, body) in (400, 404)


TOKENS = st.one_of(
    st.just("x.eyJlbWFpbCI6ICJhQGIifQ.x"),
    st.builds(lambda claims: f"x.{base64.urlsafe_b64encode(claims).decode()}.x", st.binary(max_size=30)),
    st.builds(lambda claims: f"x.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode()}.x", odd_values),
    st.just(f"x.{base64.urlsafe_b64encode(b'[' * 20_000).decode()}.x"),
    st.text("ab.=%/é ", max_size=12),
)


@settings(QUIET, max_examples=80)
@given(mutated([{"run": NOBODY, "proof": "5" * 64}]) | odd_values, TOKENS)
def test_a_bad_request_for_access_is_400_or_404(app: App, body: Any, token: str) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    assert app.post("access", body, headers) in (400, 404)


@settings(QUIET, max_examples=40)
@given(st.sampled_from(STAGES), st.binary(max_size=20))
def test_a_request_of_bytes_is_400(app: App, name: str, body: bytes) -> None:
    assert app.post(name, body) == 400


@settings(QUIET, max_examples=40)
@given(bodies, st.sampled_from(["application/json", "text/plain", "", "x/" + "y" * 500]), st.booleans())
def test_a_request_to_a_callback_wakes_the_execution_or_is_refused(
    app: App, body: bytes, kind: str, is_right: bool
) -> None:
    name = app.engine.create_execution(WORKFLOW, "{}").name
    waiting: list[Any] = []
    while not waiting:
        waiting = [ref for ref, _, waits in app.engine.list_callbacks(name) if waits]
    path = f"{name}/callbacks/{waiting[0] if is_right else 'no-such-callback'}"
    request = urllib.request.Request(f"{app.url}/v1/{path}", body, {"Content-Type": kind, "Authorization": "Bearer x"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status = answer.status
    except urllib.error.HTTPError as refused:
        status = refused.code
        refused.close()
    assert status < 500
    assert app.engine.get(name).state in ("ACTIVE", "SUCCEEDED")
    assert is_right or app.engine.get(name).state == "ACTIVE"
    if app.engine.get(name).state == "ACTIVE":
        app.engine.cancel(name)


def test_no_malformed_request_started_a_run(app: App) -> None:
    """After all tests above: every run is rejected, apart from the accepted run of the fixture."""
    assert names.is_run_id(NOBODY)
    for run in app.store.runs():
        record = app.store.find(run)
        assert record is None or record.state is RunState.REJECTED or run.startswith("fuzzed-"), run
