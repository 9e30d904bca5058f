"""Counts the requests to the revisions of a service, by Cloud Monitoring.

API: https://cloud.google.com/monitoring/api/ref_v3/rest/v3/projects.timeSeries/list
Metrics: https://cloud.google.com/monitoring/api/metrics_gcp_p_z#gcp-run (each minute, visible after up to 3 minutes)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from math import ceil
from typing import Any

from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.context import Cloud
from dropforge.platforms.named import Counted

REQUESTS, LATENCIES = "run.googleapis.com/request_count", "run.googleapis.com/request_latencies"
LEAST_PERIOD = 60  # seconds of an alignment
REVISION, STATUS = "resource.label.revision_name", "metric.label.response_code_class"
Json = dict[str, Any]


def counted(cloud: Cloud, service: str, since: datetime) -> dict[str, Counted]:
    """The requests of each revision of a service since a time. Raises requests' and google-auth's errors."""
    requests, errors, latencies = Counter[str](), Counter[str](), dict[str, float]()
    for series, value in _values(cloud, service, since, REQUESTS, "REDUCE_SUM", REVISION, STATUS):
        revision = series["resource"]["labels"]["revision_name"]
        requests[revision] += int(value["int64Value"])
        if series["metric"]["labels"]["response_code_class"] == "5xx":
            errors[revision] += int(value["int64Value"])
    for series, value in _values(cloud, service, since, LATENCIES, "REDUCE_PERCENTILE_95", REVISION):
        revision = series["resource"]["labels"]["revision_name"]
        latencies[revision] = max(latencies.get(revision, 0.0), float(value["doubleValue"]))
    return {
        revision: Counted(requests=requests[revision], errors=errors[revision], latency_ms=latencies.get(revision))
        for revision in requests
    }


def _values(
    cloud: Cloud, service: str, since: datetime, metric: str, reducer: str, *group: str
) -> Iterator[tuple[Json, Json]]:
    """Each time series of a metric, and the value of each of its points. The period covers the whole interval."""
    _, project, _, region, _, name = service.split("/")
    now = cloud.clock.now()
    labels = {"location": region, "service_name": name}
    conditions = [f'metric.type = "{metric}"', 'resource.type = "cloud_run_revision"']
    conditions += [f'resource.labels.{label} = "{value}"' for label, value in labels.items()]
    query: Json = {
        "filter": " AND ".join(conditions),
        "interval.startTime": since.isoformat(),
        "interval.endTime": now.isoformat(),
        "aggregation.alignmentPeriod": f"{max(LEAST_PERIOD, ceil((now - since).total_seconds()))}s",
        "aggregation.perSeriesAligner": "ALIGN_DELTA",
        "aggregation.crossSeriesReducer": reducer,
        "aggregation.groupByFields": list(group),
    }
    session, url = cloud.clients.monitoring()
    answer = session.get(f"{url}/projects/{project}/timeSeries", params=query, timeout=TIMEOUT_SECONDS)
    answer.raise_for_status()
    for series in answer.json().get("timeSeries", []):  # a page has 100,000 points; there are a few for each revision
        for point in series["points"]:
            yield series, point["value"]
