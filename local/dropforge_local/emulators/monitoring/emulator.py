"""Cloud Monitoring: timeSeries.list for the requests to revisions of Cloud Run.

Google writes these metrics each minute, and shows them up to three minutes later; here they are exact and at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil
from typing import Any

from aiohttp import web

from ..cloudrun.counts import Answered, Counts
from ..kit.access import guarded
from ..kit.emulator import PassiveEmulator
from ..kit.routing import Call, Route, mount
from ..kit.times import rfc3339
from . import rules
from .permissions import NEEDS

Json = dict[str, Any]


class MonitoringEmulator(PassiveEmulator):
    """GET /v3/projects/PROJECT/timeSeries for two metrics of Cloud Run, whose requests are `counts`."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        listed = guarded(self._list, NEEDS["list_time_series"])
        return mount([Route("GET", "/v3/projects/{project}/timeSeries", listed)])

    def _list(self, call: Call) -> Json:
        query = rules.read(call.query, call.query.getall("aggregation.groupByFields", []))
        groups: defaultdict[tuple[tuple[str, str], ...], list[Answered]] = defaultdict(list)
        for revision, requests in self._counts.between(query.start, query.end):
            resource = labels_of(revision)
            if resource.items() >= query.labels.items():
                for request in requests:
                    labels = {**resource, "response_code_class": f"{request.status // 100}xx"}
                    groups[tuple((name, labels[name]) for name in query.groups)].append(request)
        return {"timeSeries": [series_of(query, dict(group), requests) for group, requests in sorted(groups.items())]}


def labels_of(revision: str) -> dict[str, str]:
    """The labels of a monitored resource `cloud_run_revision`, for the full resource name of a revision."""
    _, project, _, location, _, service, _, name = revision.split("/")
    return {"project_id": project, "location": location, "service_name": service, "revision_name": name}


def series_of(query: rules.Query, group: dict[str, str], requests: Sequence[Answered]) -> Json:
    """A time series with one point: the number of the requests, or the 95th percentile of their milliseconds."""
    if query.metric == rules.REQUESTS:
        kind, value_type, value = "DELTA", "INT64", {"int64Value": str(len(requests))}
    else:
        ordered = sorted(request.seconds for request in requests)
        kind, value_type = "GAUGE", "DOUBLE"
        value = {"doubleValue": 1000 * ordered[ceil(0.95 * len(ordered)) - 1]}  # type: ignore[dict-item]
    interval = {"startTime": rfc3339(query.start), "endTime": rfc3339(query.end)}
    metric = {name: value for name, value in group.items() if name == "response_code_class"}
    return {
        "metric": {"type": query.metric, "labels": metric},
        "resource": {
            "type": "cloud_run_revision",
            "labels": {name: value for name, value in group.items() if name not in metric},
        },
        "metricKind": kind,
        "valueType": value_type,
        "points": [{"interval": interval, "value": value}],
    }
