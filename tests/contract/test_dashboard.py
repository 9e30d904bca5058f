"""terraform/dashboard.json.tftpl is a dashboard of Cloud Monitoring, and charts only metrics that exist."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest
from google.cloud.monitoring_dashboard_v1 import Dashboard
from google.protobuf import json_format

from .configuration import TERRAFORM, local

TEMPLATE = (TERRAFORM / "dashboard.json.tftpl").read_text()
COLUMNS = 48  # https://cloud.google.com/monitoring/api/ref_v3/rest/v1/projects.dashboards#MosaicLayout
# Metrics and labels of https://cloud.google.com/monitoring/api/metrics_gcp; not yet confirmed on Google Cloud.
METRICS = {
    "pubsub.googleapis.com/subscription/oldest_unacked_message_age": {"subscription_id"},
    # Managed Service for Prometheus keeps vLLM's names; `job` is the PodMonitoring's name.
    "prometheus.googleapis.com/vllm:e2e_request_latency_seconds/histogram": {"job"},
    "prometheus.googleapis.com/vllm:generation_tokens_total/counter": {"job"},
    "prometheus.googleapis.com/vllm:num_requests_running/gauge": {"job"},
    "prometheus.googleapis.com/vllm:num_requests_waiting/gauge": {"job"},
    "run.googleapis.com/container/instance_count": {"service_name", "state"},
    "run.googleapis.com/job/running_executions": {"job_name", "location"},
    "run.googleapis.com/request_count": {"service_name", "response_code_class"},
    "run.googleapis.com/request_latencies": {"service_name", "response_code_class"},
    "workflows.googleapis.com/finished_execution_count": {"workflow_id", "status"},
}


def rendered() -> dict[str, Any]:
    """The template as templatefile() renders it: `$${` stands for `${`."""
    text = re.sub(r"(?<!\$)\$\{(\w+)\}", r"dropforge-\1", TEMPLATE).replace("$${", "${")
    dashboard: dict[str, Any] = json.loads(text)
    return dashboard


def queries() -> list[dict[str, Any]]:
    charts = [tile["widget"]["xyChart"] for tile in rendered()["mosaicLayout"]["tiles"]]
    return [data["timeSeriesQuery"]["timeSeriesFilter"] for chart in charts for data in chart["dataSets"]]


def test_google_reads_the_dashboard() -> None:
    dashboard = Dashboard()
    json_format.ParseDict(rendered(), Dashboard.pb(dashboard))
    assert len(dashboard.mosaic_layout.tiles) == len(rendered()["mosaicLayout"]["tiles"]) >= 10


@pytest.mark.parametrize("change", [{"plotTyp": "LINE"}, {"plotType": "PIE"}])
def test_a_mistake_in_a_chart_is_noticed(change: dict[str, str]) -> None:
    dashboard = rendered()
    dashboard["mosaicLayout"]["tiles"][0]["widget"]["xyChart"]["dataSets"][0] |= change
    with pytest.raises(json_format.ParseError):
        json_format.ParseDict(dashboard, Dashboard.pb(Dashboard()))


def test_every_chart_shows_a_metric_that_exists_by_labels_that_it_has() -> None:
    for query in queries():
        metric = re.search(r'metric\.type="([^"]+)"', query["filter"])
        assert metric is not None
        assert "resource.type=" in query["filter"]
        grouped = {field.rsplit(".", 1)[1] for field in query["aggregation"].get("groupByFields", [])}
        if own := metric[1].removeprefix("logging.googleapis.com/user/dropforge-prefix/"):
            known = METRICS.get(metric[1]) or set(local("log_metrics")[own].get("labels", {"stage": ""}))
            assert grouped - {"location"} <= known, metric[1]


def test_no_tile_covers_another() -> None:
    tiles = rendered()["mosaicLayout"]["tiles"]
    assert rendered()["mosaicLayout"]["columns"] == COLUMNS
    assert all(tile["xPos"] + tile["width"] <= COLUMNS for tile in tiles)
    for one, other in combinations(tiles, 2):
        apart = (
            one["xPos"] + one["width"] <= other["xPos"]
            or other["xPos"] + other["width"] <= one["xPos"]
            or one["yPos"] + one["height"] <= other["yPos"]
            or other["yPos"] + other["height"] <= one["yPos"]
        )
        assert apart, (one["widget"]["title"], other["widget"]["title"])
