"""Counts the requests to the revisions of a service, by Cloud Monitoring.

Metrics: https://cloud.google.com/monitoring/api/metrics_gcp_p_z#gcp-run (each minute, visible after up to 3 minutes)
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from dropforge.cloud import monitoring
from dropforge.cloud.context import Cloud
from dropforge.cloud.monitoring import Json
from dropforge.platforms.named import Counted, count

REQUESTS, LATENCIES = "run.googleapis.com/request_count", "run.googleapis.com/request_latencies"
REVISION, STATUS = "resource.label.revision_name", "metric.label.response_code_class"


def counted(cloud: Cloud, service: str, since: datetime) -> dict[str, Counted]:
    """The requests of each revision of a service since a time. Raises requests' and google-auth's errors."""
    requests = _values(cloud, service, since, REQUESTS, monitoring.SUM, REVISION, STATUS)
    latencies = _values(cloud, service, since, LATENCIES, monitoring.PERCENTILE_95, REVISION)
    return count(
        (
            (_revision(series), series["metric"]["labels"]["response_code_class"] == "5xx", int(value["int64Value"]))
            for series, value in requests
        ),
        ((_revision(series), float(value["doubleValue"])) for series, value in latencies),
    )


def _revision(series: Json) -> str:
    return str(series["resource"]["labels"]["revision_name"])


def _values(
    cloud: Cloud, service: str, since: datetime, metric: str, reducer: str, *group: str
) -> Iterator[tuple[Json, Json]]:
    _, project, _, region, _, name = service.split("/")
    labels = {"location": region, "service_name": name}
    conditions = [f'metric.type = "{metric}"', 'resource.type = "cloud_run_revision"']
    conditions += [f'resource.labels.{label} = "{value}"' for label, value in labels.items()]
    return monitoring.values(cloud, project, conditions, since, reducer, *group)
