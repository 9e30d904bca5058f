"""A trace against an emulated Telemetry API that reads protobuf, and against receivers that misbehave."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.cloud.clients import TELEMETRY_API, Clients
from dropforge.context import Context
from dropforge.run.record import Endpoint, Notice, Record, RunError, RunState, Transition
from dropforge.run.spans import spans_of
from dropforge.run.store import RunStore
from dropforge.tell import otlp
from dropforge.tell.channel import Failure
from dropforge.tell.news import notice_news
from dropforge.tell.outgoing import post
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.telemetry import TelemetryEmulator

from ..deployments import SETTINGS
from .stories import NOW, RUN, context_at, news_of, record_of
from .test_outgoing import server_with

HISTORY = [Transition(state=state, time=NOW) for state in (RunState.ACCEPTED, RunState.TEARING_DOWN, RunState.FAILED)]
ERROR = RunError(error_class=ErrorClass.CODE, message="m")
NEWS = news_of(RunState.FAILED)


def ended_run(**fields: Any) -> Record:
    """Return the record of a failed run that had an execution."""
    return record_of(RunState.FAILED, **{"history": HISTORY, "execution": "e", "error": ERROR, **fields})


def context_of(record: Record, **environment: str) -> Context:
    """Return a context whose bucket has the record."""
    context = context_at({"DROPFORGE_PROJECT": SETTINGS.project, "DROPFORGE_EMULATOR_TOKEN": "t", **environment})
    assert context.store.create(record)
    return context


@pytest.fixture
def api(tmp_path: Path) -> Iterator[str]:
    def emulators() -> list[TelemetryEmulator]:
        return [TelemetryEmulator(Database(tmp_path / "state.db"), SystemClock(), SETTINGS.project)]

    with BackgroundServer(emulators) as server:
        yield server.url


def taken(url: str) -> list[dict[str, Any]]:
    listed = requests.get(f"{url}/telemetry/traces/{names.trace_id(RUN)}", timeout=60).json()
    spans: list[dict[str, Any]] = listed["spans"]
    return spans


def test_the_api_takes_a_trace_and_a_repeat_has_the_same_ids(api: str) -> None:
    context = context_of(ended_run(), TELEMETRY_EMULATOR_HOST=api)
    assert [otlp.send(context, TELEMETRY_API, NEWS) for _ in range(2)] == [None, None]
    ids = [span["spanId"] for span in taken(api)]
    assert len(ids) == 6
    assert ids[:3] == ids[3:]
    root = taken(api)[0]
    assert root["status"] == {"code": "STATUS_CODE_ERROR", "message": "m"}
    assert root["attributes"]["error.type"] == "code"
    assert root["resource"]["gcp.project_id"] == SETTINGS.project
    assert root["resource"]["service.name"] == "dropforge"


def test_the_process_that_has_ended_the_run_does_not_read_the_record_again(api: str) -> None:
    context = context_of(ended_run(), TELEMETRY_EMULATOR_HOST=api)
    context.store.bucket.objects.clear()
    assert otlp.send(context, TELEMETRY_API, NEWS) is None
    assert len(taken(api)) == 3


def test_a_record_that_is_remembered_from_before_the_end_is_read_again(api: str) -> None:
    context = context_of(record_of(RunState.TRAINING, execution="e"), TELEMETRY_EMULATOR_HOST=api)
    elsewhere = RunStore(context.store.bucket, SETTINGS.runs_bucket)
    elsewhere.update(RUN, lambda _: ended_run())
    assert otlp.send(context, TELEMETRY_API, NEWS) is None
    assert taken(api)[0]["status"]["code"] == "STATUS_CODE_ERROR"


def test_a_notice_after_the_end_sends_what_ended_since_then(api: str) -> None:
    later = NOW + timedelta(hours=1)
    endpoint = Endpoint(
        url="https://e", model="m", service="s", region="r", ready=NOW, expires=later, ended=NOW + timedelta(minutes=9)
    )
    record = ended_run(endpoint=endpoint)
    context = context_of(record, TELEMETRY_EMULATOR_HOST=api)
    notice = notice_news(record, Notice("endpoint-ended", "is not served any more", "text"), SETTINGS, NOW)
    assert otlp.send(context, TELEMETRY_API, notice) is None
    assert [(span["name"], span["parentSpanId"]) for span in taken(api)] == [("endpoint", names.span_id(RUN, "run"))]


@pytest.mark.parametrize(
    ("record", "news"),
    [
        (record_of(RunState.TRAINING, execution="e"), news_of(RunState.ACCEPTED)),
        (record_of(RunState.REJECTED), news_of(RunState.REJECTED)),
        (ended_run(), notice_news(ended_run(), Notice("k", "h", "t"), SETTINGS, NOW)),
    ],
)
def test_nothing_is_sent_before_the_end_for_a_rejected_spec_or_without_news(
    api: str, record: Record, news: Any
) -> None:
    assert otlp.send(context_of(record, TELEMETRY_EMULATOR_HOST=api), TELEMETRY_API, news) is None
    assert taken(api) == []


def test_only_google_gets_a_token() -> None:
    clients = Clients({"DROPFORGE_EMULATOR_TOKEN": "t", "DROPFORGE_PROJECT": "p"})
    headers = {"Authorization": "Bearer t", "x-goog-user-project": "p"}
    assert clients.telemetry(TELEMETRY_API) == (TELEMETRY_API, headers)
    for foreign in ("http://telemetry.googleapis.com", f"{TELEMETRY_API}.example.com", "http://collector:4318"):
        assert clients.telemetry(foreign) == (foreign, {})


@pytest.mark.parametrize(("status", "may_pass"), [(400, False), (403, False), (429, True), (500, True), (503, True)])
def test_a_collector_inside_the_network_is_called_and_its_refusal_is_a_failure(status: int, may_pass: bool) -> None:
    heard: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        heard.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % status)

    with server_with(answer) as port:
        failure = otlp.send(context_of(ended_run()), f"http://127.0.0.1:{port}/", NEWS)
    assert isinstance(failure, Failure)
    assert failure.may_pass is may_pass
    assert heard[0].startswith(b"POST /v1/traces HTTP/1.1\r\n")
    assert b"Content-Type: application/x-protobuf" in heard[0]
    assert b"Authorization" not in heard[0]


@pytest.mark.parametrize(("minutes", "may_pass"), [(59, True), (61, False)])
def test_a_receiver_that_stays_down_is_given_up(minutes: int, may_pass: bool) -> None:
    """It is the same for all runs: otherwise each sweep would wait for it once for each of them."""
    context = context_at({}, NOW + timedelta(minutes=minutes))
    assert context.store.create(ended_run())
    with server_with(lambda connection: None) as port:
        failure = otlp.send(context, f"http://127.0.0.1:{port}", NEWS)
    assert failure is not None
    assert failure.may_pass is may_pass
    assert ("given up" in failure.problem) is not may_pass


def test_a_receiver_that_hangs_or_drips_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "post", partial(post, limit=0.3))

    def drip(connection: socket.socket) -> None:
        while True:  # a byte comes before each timeout of a read, for ever
            connection.sendall(b"x")
            connection.recv(1)

    with server_with(drip) as port:
        failure = otlp.send(context_of(ended_run()), f"http://127.0.0.1:{port}", NEWS)
    assert failure is not None
    assert failure.may_pass


@pytest.mark.parametrize("url", ["ftp://x", "http://10.0.0.1", "https://127.0.0.1", "http://[", "https://x:port", ""])
def test_a_url_that_is_no_receiver_is_a_failure(url: str) -> None:
    failure = otlp.send(context_of(ended_run()), url, NEWS)
    assert failure is not None
    assert not failure.may_pass


def test_a_bucket_that_does_not_answer_is_a_failure_that_may_pass() -> None:
    context = context_at({})
    failure = otlp.send(context, TELEMETRY_API, NEWS)
    assert failure == Failure("the trace could not be made: NotFound", may_pass=True)


def test_the_address_is_the_deployment_s() -> None:
    assert otlp.address_of(None, SETTINGS) is None
    assert otlp.address_of(None, replace(SETTINGS, otlp_endpoint=TELEMETRY_API)) == TELEMETRY_API


@given(text=st.text(max_size=60), name=st.text(st.characters(exclude_categories=[]), max_size=60))
def test_any_text_makes_a_document_that_protobuf_reads(text: str, name: str) -> None:
    """Names and errors come from specs, containers and clouds: half a surrogate pair, too, is no reason to raise."""
    error = RunError.model_construct(error_class=ErrorClass.CODE, message=name)
    record = ended_run().model_copy(update={"name": name, "source": text, "error": error})
    document = otlp.document_of(RUN, spans_of(record), SETTINGS)
    assert json.loads(json.dumps(document)) == document
    request = ExportTraceServiceRequest.FromString(otlp.protobuf_of(document))
    spans = request.resource_spans[0].scope_spans[0].spans
    assert {span.trace_id.hex() for span in spans} == {names.trace_id(RUN)}
    assert [span.span_id.hex() for span in spans] == [s["spanId"] for s in spans_in(document)]
    shown = next(a.value.string_value for a in spans[0].attributes if a.key == "dropforge.run.name")
    assert shown.isprintable()


def test_a_value_has_the_type_of_its_own() -> None:
    """OTLP's JSON writes a whole number of 64 bits as text (https://protobuf.dev/programming-guides/json/)."""
    values: dict[str, str | int | float] = {"yes": True, "count": 2**60, "share": 0.5, "text": "a\nb"}
    assert {each["key"]: each["value"] for each in otlp._attributes(values)} == {
        "yes": {"boolValue": True},
        "count": {"intValue": str(2**60)},
        "share": {"doubleValue": 0.5},
        "text": {"stringValue": "a b"},
    }


def test_times_are_exact_to_the_microsecond() -> None:
    begins = NOW.replace(microsecond=123457)
    history = [transition.model_copy(update={"time": begins}) for transition in HISTORY]
    [root, *_] = spans_in(otlp.document_of(RUN, spans_of(ended_run(history=history)), SETTINGS))
    assert root["startTimeUnixNano"] == f"{int(NOW.timestamp())}123457000"


def test_no_credential_leaves_in_a_span() -> None:
    secret = "hf_" + "a" * 34
    error = RunError.model_construct(error_class=ErrorClass.CODE, message=f"the token {secret} is wrong")
    record = ended_run().model_copy(update={"name": secret, "error": error})
    assert secret not in json.dumps(otlp.document_of(RUN, spans_of(record), SETTINGS))


def spans_in(document: dict[str, Any]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    return spans
