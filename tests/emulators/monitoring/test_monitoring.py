"""What the emulated Cloud Monitoring lists and refuses, asked over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Emulator
from dropforge_local.emulators.cloudrun.counts import Answered, Counts
from dropforge_local.emulators.monitoring import MonitoringEmulator
from dropforge_local.emulators.pubsub import PubSubEmulator

SERVICE = "projects/p/locations/us-central1/services/{}/revisions/{}"
COUNT, LATENCY = "run.googleapis.com/request_count", "run.googleapis.com/request_latencies"
BACKLOG = (
    'metric.type = "pubsub.googleapis.com/subscription/num_undelivered_messages" AND '
    'resource.type = "pubsub_subscription" AND resource.labels.subscription_id = one_of("a", "b")'
)
START = 1_000_000.0
QUERY = {
    "filter": f'metric.type = "{COUNT}" AND resource.labels.service_name = "s"',
    "interval.startTime": "1970-01-12T13:46:40Z",
    "interval.endTime": "1970-01-12T13:56:40Z",
    "aggregation.alignmentPeriod": "600s",
    "aggregation.perSeriesAligner": "ALIGN_DELTA",
    "aggregation.crossSeriesReducer": "REDUCE_SUM",
    "aggregation.groupByFields": ["resource.label.revision_name", "metric.label.response_code_class"],
}


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    counts = Counts()
    for second in range(1, 101):  # latencies of 10 to 1000 ms
        counts.add(SERVICE.format("s", "s-1"), Answered(START + second, 200, second / 100))
    for time, status in ((START + 1, 500), (START + 2, 503), (START - 1, 500), (START + 601, 500)):
        counts.add(SERVICE.format("s", "s-2"), Answered(time, status, 0.1))
    counts.add(SERVICE.format("other", "other-1"), Answered(START + 1, 200, 0.1))

    def emulators() -> list[Emulator]:
        return [MonitoringEmulator(counts, PubSubEmulator(Database(tmp_path / "state.db"), SystemClock()))]

    with BackgroundServer(emulators) as server:
        yield f"{server.url}/v3/projects/p/timeSeries"


def listed(url: str, **changes: Any) -> Any:
    answer = requests.get(url, params={**QUERY, **changes}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["timeSeries"]


def test_requests_are_counted_by_revision_and_status_within_the_interval(url: str) -> None:
    found = {
        (series["resource"]["labels"]["revision_name"], series["metric"]["labels"]["response_code_class"]): [
            point["value"]["int64Value"] for point in series["points"]
        ]
        for series in listed(url)
    }
    assert found == {("s-1", "2xx"): ["100"], ("s-2", "5xx"): ["2"]}


def test_latencies_are_reduced_to_a_percentile_in_milliseconds(url: str) -> None:
    changes = {
        "filter": f'metric.type="{LATENCY}" AND resource.labels.revision_name="s-1"',
        "aggregation.crossSeriesReducer": "REDUCE_PERCENTILE_95",
        "aggregation.groupByFields": ["resource.label.revision_name"],
    }
    (series,) = listed(url, **changes)
    assert (series["valueType"], series["points"][0]["value"]) == ("DOUBLE", {"doubleValue": 950.0})


@pytest.mark.parametrize(
    ("changes", "status", "expected"),
    [
        ({"filter": "metric.type"}, 400, "Field filter"),
        ({"filter": 'metric.type = "run.googleapis.com/other"'}, 501, "the metric"),
        ({"filter": f'metric.type = "{COUNT}" AND metric.labels.route = "r"'}, 501, "a filter by"),
        ({"interval.endTime": "yesterday"}, 400, "Field interval.endTime"),
        ({"interval.endTime": "1970-01-12T13:46:39Z"}, 400, "Field interval"),
        ({"aggregation.alignmentPeriod": "59s"}, 400, "at least 60s"),
        ({"aggregation.alignmentPeriod": "60s"}, 501, "an alignment period of 60s"),
        ({"aggregation.perSeriesAligner": "ALIGN_RATE"}, 501, "the aligner"),
        ({"aggregation.crossSeriesReducer": "REDUCE_MEAN"}, 501, "the reducer"),
        ({"aggregation.groupByFields": ["metric.label.response_code_class"]}, 501, "groups by"),
        ({"filter": BACKLOG}, 501, "aggregation.alignmentPeriod"),
        ({"filter": BACKLOG.replace("one_of", "starts_with")}, 501, "one_of"),
    ],
)
def test_what_is_refused(url: str, changes: dict[str, Any], status: int, expected: str) -> None:
    answer = requests.get(url, params={**QUERY, **changes}, timeout=60)
    assert answer.status_code == status
    assert expected in answer.json()["error"]["message"]


@pytest.mark.parametrize("query", [{}, {"filter": 'state="CLOSED"'}, {"filter": 'state="OPEN"', "orderBy": "openTime"}])
def test_other_lists_of_alerts_are_refused(url: str, query: dict[str, str]) -> None:
    answer = requests.get(url.replace("timeSeries", "alerts"), params=query, timeout=60)
    assert (answer.status_code, "a list of alerts" in answer.text) == (501, True)
