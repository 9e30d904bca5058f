"""`dropforge trace`: a timeline that fits 80 columns, and the trace as a receiver of OpenTelemetry reads it."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from rich.cells import cell_len
from rich.console import Console

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.run.record import Record, RunError, RunState
from dropforge.run.series import Progress
from dropforge.run.spans import spans_of
from dropforge.tell.otlp import protobuf_of
from dropforge_cli.trace import show

from .conftest import CREATED, Deployed, attempt

RUN = "job-0123456789ab"
ERROR = RunError(error_class=ErrorClass.PREEMPTED, message="the machine was \x1b[31mtaken away")


def started(deployed: Deployed, **changes: object) -> Record:
    return deployed.record(RUN, RunState.FAILED, attempts=[attempt(error=ERROR), attempt(2)], error=ERROR, **changes)


def test_every_span_has_a_line_and_every_error_its_reason(deployed: Deployed) -> None:
    started(deployed)
    deployed.series(RUN, Progress(attempt=2, time=CREATED, step=1, total_steps=2))
    result = deployed.run("trace")
    assert result.exit_code == 0, result.output
    assert f"trace {names.trace_id(RUN)}, from 2026-11-20 12:00:00 UTC\n" in result.output
    begun = [line.split("  ")[0] for line in result.output.splitlines()[2:]]
    assert begun[:3] == ["accepted", "attempt 1", ""]
    assert "  train" in result.output
    assert "attempt 1: preempted: the machine was \\x1b[31mtaken away\n" in result.output
    assert "\x1b" not in result.output


def test_the_json_is_what_a_receiver_of_opentelemetry_takes(deployed: Deployed) -> None:
    started(deployed)
    document = json.loads(deployed.run("trace", RUN, "--json").stdout)
    request = ExportTraceServiceRequest.FromString(protobuf_of(document))
    spans = request.resource_spans[0].scope_spans[0].spans
    assert {span.trace_id.hex() for span in spans} == {names.trace_id(RUN)}
    assert spans[0].span_id.hex() == names.span_id(RUN, "run")
    assert spans[0].end_time_unix_nano - spans[0].start_time_unix_nano == 90 * 10**9


@pytest.mark.parametrize("seconds", [0, 1, 90, 10_000, 10_000_000])
def test_a_timeline_fits_80_columns_whatever_lasts_long(deployed: Deployed, seconds: int) -> None:
    record = started(deployed, name="n" * 20)
    text = StringIO()
    show(record, spans_of(record), CREATED + timedelta(seconds=seconds), Console(file=text, width=80, markup=False))
    lines = text.getvalue().splitlines()
    assert max(cell_len(line) for line in lines) <= 80
    assert all("━" in line or ">" in line for line in lines[2:-3]), text.getvalue()


def test_a_run_without_time_has_a_timeline(deployed: Deployed) -> None:
    deployed.record(RUN, RunState.REJECTED, history=[{"state": "REJECTED", "time": CREATED}])
    assert deployed.run("trace", RUN).exit_code == 0
