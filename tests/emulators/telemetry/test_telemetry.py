"""What the emulated Telemetry API takes and refuses: it judges every trace of the other tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.telemetry import TelemetryEmulator

TRACE, SPAN = bytes(range(16)), bytes(range(8))
HEADERS = {"Content-Type": "application/x-protobuf", "x-goog-user-project": "p"}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with BackgroundServer(lambda: [TelemetryEmulator(Database(tmp_path / "state.db"), SystemClock(), "p")]) as server:
        yield server.url


def body(project: str = "p", **changes: Any) -> bytes:
    """Return a request with one span."""
    attributes = [{"key": "gcp.project_id", "value": {"stringValue": project}}]
    span = {"name": "n", "startTimeUnixNano": "1", "endTimeUnixNano": "2"}
    spans = {"resource": {"attributes": attributes}, "scopeSpans": [{"spans": [span]}]}
    request = ParseDict({"resourceSpans": [spans]}, ExportTraceServiceRequest())
    made = request.resource_spans[0].scope_spans[0].spans[0]
    for field, value in {"trace_id": TRACE, "span_id": SPAN, **changes}.items():
        setattr(made, field, value)
    message: bytes = request.SerializeToString()
    return message


def test_a_span_is_taken_and_listed(url: str) -> None:
    answer = requests.post(f"{url}/v1/traces", body(), headers=HEADERS, timeout=60)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["Content-Type"] == "application/x-protobuf"
    [span] = requests.get(f"{url}/telemetry/traces/{TRACE.hex()}", timeout=60).json()["spans"]
    assert (span["spanId"], span["name"], span["start"], span["end"]) == (SPAN.hex(), "n", 1, 2)


@pytest.mark.parametrize(
    ("data", "headers", "expected"),
    [
        (b"\xff", {}, "no ExportTraceServiceRequest"),
        (b"{}", {"Content-Type": "application/json"}, "takes application/x-protobuf"),
        (body(), {"x-goog-user-project": "other"}, "x-goog-user-project"),
        (body("other"), {}, "gcp.project_id is ['other']"),
        (body(trace_id=b"x"), {}, "an id that is not valid"),
        (body(span_id=bytes(8)), {}, "an id that is not valid"),
        (body(parent_span_id=b"x"), {}, "an id that is not valid"),
        (body(name=""), {}, "name has 0 characters"),
        (body(name="n" * 1025), {}, "name has 1025 characters"),
        (body(end_time_unix_nano=0), {}, "has not ended"),
        (body(start_time_unix_nano=3), {}, "ended before it began"),
    ],
)
def test_other_requests_are_refused_and_store_nothing(
    url: str, data: bytes, headers: dict[str, str], expected: str
) -> None:
    answer = requests.post(f"{url}/v1/traces", data, headers={**HEADERS, **headers}, timeout=60)
    assert answer.status_code in (400, 403)
    assert expected in answer.json()["error"]["message"]
    assert requests.get(f"{url}/telemetry/traces/{TRACE.hex()}", timeout=60).json() == {"spans": []}


@pytest.mark.parametrize("path", ["/v1/metrics", "/v1/logs"])
def test_metrics_and_logs_are_not_emulated(url: str, path: str) -> None:
    assert requests.post(f"{url}{path}", b"", headers=HEADERS, timeout=60).status_code == 501
