"""Sums and percentiles of Google Cloud's metrics, by Cloud Monitoring.

API: https://cloud.google.com/monitoring/api/ref_v3/rest/v3/projects.timeSeries/list
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from math import ceil
from typing import Any

from .clients import TIMEOUT_SECONDS
from .context import Cloud

SUM, PERCENTILE_95 = "REDUCE_SUM", "REDUCE_PERCENTILE_95"
LEAST_PERIOD = 60  # seconds of an alignment
Json = dict[str, Any]


def values(
    cloud: Cloud, project: str, conditions: list[str], since: datetime, reducer: str, *group: str
) -> Iterator[tuple[Json, Json]]:
    """Each time series since a time that fulfils the conditions, and the value of each of its points.

    `group` are the labels by which series are joined. The period covers the whole interval. Raises requests' and
    google-auth's errors.
    """
    now = cloud.clock.now()
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
