"""report.json has what a client of the endpoint needs."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dropforge.run.record import Endpoint, Record, RunState, Transition
from dropforge.spec import parse_spec
from dropforge.tell.report import report

NOW = datetime(2026, 11, 24, tzinfo=UTC)


@pytest.mark.parametrize(
    ("serve", "expected"),
    [
        ({"type": "cloud_run"}, ("https://e/v1", "n", "identity_token")),
        ({"type": "gke", "accelerator": "nvidia-l4", "region": "us-central1"}, ("https://e/v1", "n", "api_key")),
        (None, None),
    ],
)
def test_a_report_says_how_its_endpoint_is_called(serve: Any, expected: Any) -> None:
    document = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "owner/rows"},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": serve,
    }
    endpoint = Endpoint(
        url="https://e", model="n", service="s", region="us-central1", ready=NOW, expires=NOW + timedelta(hours=1)
    )
    record = Record(
        run="n-0123456789ab",
        name="n",
        source="s",
        state=RunState.SUCCEEDED,
        created=NOW,
        history=[Transition(state=RunState.SUCCEEDED, time=NOW)],
        endpoint=endpoint if serve else None,
    )
    told = report(record, parse_spec(json.dumps(document).encode()), NOW)["endpoint"]
    assert expected == (told and (told["base_url"], told["model"], told["credential"]))
