"""report.json has what a client of the endpoint needs."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dropforge.base.errors import ErrorClass
from dropforge.run.record import Endpoint, Record, RunError, RunState, Transition
from dropforge.spec import JobSpec, parse_spec
from dropforge.tell.report import report

NOW = datetime(2026, 11, 24, tzinfo=UTC)


def spec(serve: Any) -> JobSpec:
    document = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "owner/rows"},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": serve,
    }
    return parse_spec(json.dumps(document).encode())


def record(state: RunState, **fields: Any) -> Record:
    history = [Transition(state=state, time=NOW)]
    return Record(run="n-0123456789ab", name="n", source="s", state=state, created=NOW, history=history, **fields)


@pytest.mark.parametrize(
    ("serve", "expected"),
    [
        ({"type": "cloud_run"}, ("https://e/v1", "n", "identity_token")),
        ({"type": "gke", "accelerator": "nvidia-l4", "region": "us-central1"}, ("https://e/v1", "n", "api_key")),
        (None, None),
    ],
)
def test_a_report_says_how_its_endpoint_is_called(serve: Any, expected: Any) -> None:
    endpoint = Endpoint(
        url="https://e", model="n", service="s", region="us-central1", ready=NOW, expires=NOW + timedelta(hours=1)
    )
    told = report(record(RunState.SUCCEEDED, endpoint=endpoint if serve else None), spec(serve), NOW)["endpoint"]
    assert expected == (told and (told["base_url"], told["model"], told["credential"]))


def test_a_report_says_why_a_run_failed() -> None:
    error = RunError(error_class=ErrorClass.DATA, message="no rows", hint="add rows")
    told = report(record(RunState.FAILED, error=error), spec(None), NOW)
    assert told["error"] == {"error_class": "data", "message": "no rows", "hint": "add rows"}
    assert report(record(RunState.SUCCEEDED), spec(None), NOW)["error"] is None
