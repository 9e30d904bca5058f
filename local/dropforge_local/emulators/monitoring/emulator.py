"""Cloud Monitoring: timeSeries.list for the requests to revisions of Cloud Run, for those through internal Application
Load Balancers and for the messages that wait in subscriptions of Pub/Sub; alerts.list for the alert `dead_letters` of
terraform/alerts.tf.

Google writes these metrics each minute, and shows them up to three minutes later; here they are exact and at once. The
other alerts of Terraform need metrics that the local stack lacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from math import ceil
from typing import Any

from aiohttp import web

from ..cloudrun.counts import Answered, Counts
from ..kit.access import guarded
from ..kit.emulator import PassiveEmulator
from ..kit.routing import Call, Route, mount
from ..kit.times import rfc3339
from ..pubsub import PubSubEmulator
from . import rules
from .permissions import NEEDS

Json = dict[str, Any]


class MonitoringEmulator(PassiveEmulator):
    """The requests to Cloud Run are `counts`; those through load balancers are `balanced`, by the name of the backend.

    `dead_letters` are the subscriptions that the alert watches.
    """

    def __init__(
        self, counts: Counts, pubsub: PubSubEmulator, dead_letters: Sequence[str] = (), balanced: Counts | None = None
    ) -> None:
        self._counts = counts
        self._balanced = balanced or Counts()
        self._pubsub = pubsub
        self._dead_letters = dead_letters

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        series = guarded(self._list, NEEDS["list_time_series"])
        alerts = guarded(self._alerts, NEEDS["list_alerts"])
        project = "/v3/projects/{project}"
        return mount([Route("GET", f"{project}/timeSeries", series), Route("GET", f"{project}/alerts", alerts)])

    def _list(self, call: Call) -> Json:
        metric, by = rules.metric_of(call.query.get("filter", "")), call.query.getall("aggregation.groupByFields", [])
        if metric in rules.BACKLOG:
            return {"timeSeries": list(self._backlog(call))}
        if metric in rules.BALANCED:
            return {"timeSeries": self._balanced_series(*rules.read_balanced(call.query, by))}
        query = rules.read(call.query, by)
        groups: defaultdict[tuple[tuple[str, str], ...], list[Answered]] = defaultdict(list)
        for revision, requests in self._counts.between(query.start, query.end):
            resource = labels_of(revision)
            if resource.items() >= query.labels.items():
                for request in requests:
                    labels = {**resource, "response_code_class": f"{request.status // 100}xx"}
                    groups[tuple((name, labels[name]) for name in query.groups)].append(request)
        return {"timeSeries": [series_of(query, dict(group), requests) for group, requests in sorted(groups.items())]}

    def _balanced_series(self, query: rules.Query, backends: Sequence[str]) -> list[Json]:
        groups: defaultdict[tuple[tuple[str, str], ...], list[Answered]] = defaultdict(list)
        for backend, requests in self._balanced.between(query.start, query.end):
            for request in requests if backend in backends else ():
                labels = {"backend_name": backend, "response_code_class": str(request.status // 100 * 100)}
                groups[tuple((name, labels[name]) for name in query.groups)].append(request)
        found = sorted(groups.items())
        return [series_of(query, dict(group), requests, "internal_http_lb_rule") for group, requests in found]

    def _backlog(self, call: Call) -> Iterator[Json]:
        query, project = rules.read_backlog(call.query), call.names["project"]
        for name in query.subscriptions:
            found = self._pubsub.undelivered(f"projects/{project}/subscriptions/{name}")
            if found is None:
                continue
            value = found.messages if query.metric == rules.UNDELIVERED else _age(found.oldest, query.end)
            moment = rfc3339(query.end)
            yield {
                "metric": {"type": query.metric, "labels": {}},
                "resource": {
                    "type": "pubsub_subscription",
                    "labels": {"project_id": project, "subscription_id": name},
                },
                "metricKind": "GAUGE",
                "valueType": "INT64",
                "points": [{"interval": {"startTime": moment, "endTime": moment}, "value": {"int64Value": str(value)}}],
            }

    def _alerts(self, call: Call) -> Json:
        rules.check_alerts(call.query)
        project = call.names["project"]
        found = [self._pubsub.undelivered(f"projects/{project}/subscriptions/{name}") for name in self._dead_letters]
        opened = min((each.oldest for each in found if each and each.messages), default=None)
        if opened is None:
            return {}
        name = sha256(f"{project} dead_letters {opened}".encode()).hexdigest()[:16]
        policy = {"name": f"projects/{project}/alertPolicies/dead_letters", "displayName": "dropforge dead_letters"}
        alert = {
            "name": f"projects/{project}/alerts/0.{name}",
            "state": "OPEN",
            "openTime": rfc3339(opened),
            "policy": {**policy, "severity": "ERROR"},
        }
        return {"alerts": [alert]}


def _age(oldest: float, now: float) -> int:
    return max(0, round(now - oldest)) if oldest else 0


def labels_of(revision: str) -> dict[str, str]:
    """The labels of a monitored resource `cloud_run_revision`, for the full resource name of a revision."""
    _, project, _, location, _, service, _, name = revision.split("/")
    return {"project_id": project, "location": location, "service_name": service, "revision_name": name}


def series_of(
    query: rules.Query, group: dict[str, str], requests: Sequence[Answered], resource: str = "cloud_run_revision"
) -> Json:
    """A time series with one point: the number of the requests, or the 95th percentile of their milliseconds."""
    if query.metric.endswith("/request_count"):
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
            "type": resource,
            "labels": {name: value for name, value in group.items() if name not in metric},
        },
        "metricKind": kind,
        "valueType": value_type,
        "points": [{"interval": interval, "value": value}],
    }
