"""The query of timeSeries.list, as far as it is emulated, and the checks of Google's front end.

https://cloud.google.com/monitoring/api/ref_v3/rest/v3/projects.timeSeries/list
https://cloud.google.com/monitoring/api/v3/filters
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from dropforge_local.base.errors import ApiError

REQUESTS, LATENCIES = "run.googleapis.com/request_count", "run.googleapis.com/request_latencies"
REDUCERS = {REQUESTS: "REDUCE_SUM", LATENCIES: "REDUCE_PERCENTILE_95"}
UNDELIVERED = "pubsub.googleapis.com/subscription/num_undelivered_messages"
OLDEST = "pubsub.googleapis.com/subscription/oldest_unacked_message_age"
BACKLOG = {UNDELIVERED, OLDEST}
BALANCED = {
    "loadbalancing.googleapis.com/https/internal/request_count": "REDUCE_SUM",
    "loadbalancing.googleapis.com/https/internal/backend_latencies": "REDUCE_PERCENTILE_95",
}
GROUPS = {"revision_name", "response_code_class"}
LABELS = {"location", "project_id", "revision_name", "service_name"}
LEAST_PERIOD = 60  # seconds
_CONDITION = re.compile(r'\s*(metric|resource)\.(type|labels?\.\w+)\s*=\s*"([^"\\]*)"\s*')
_METRIC = re.compile(r'metric\.type\s*=\s*"([^"\\]*)"')
_ONE_OF = re.compile(
    r'metric\.type\s*=\s*"[^"\\]*" AND resource\.type\s*=\s*"pubsub_subscription" AND '
    r'resource\.labels?\.subscription_id\s*=\s*one_of\(("[^"\\]*"(?:,\s*"[^"\\]*")*)\)'
)
_BACKENDS = re.compile(
    r'metric\.type\s*=\s*"[^"\\]*" AND resource\.type\s*=\s*"internal_http_lb_rule" AND '
    r'resource\.labels?\.backend_name\s*=\s*one_of\(("[^"\\]*"(?:,\s*"[^"\\]*")*)\)'
)
_GROUP = re.compile(r"(?:resource|metric)\.labels?\.(\w+)")


class Query(NamedTuple):
    """A query: the metric, the labels of the resource that must be equal, the times in seconds since the epoch, and the
    labels by which the series are grouped."""

    metric: str
    labels: dict[str, str]
    start: float
    end: float
    groups: tuple[str, ...]


class BacklogQuery(NamedTuple):
    """A query for the messages that wait in subscriptions, at the end of an interval."""

    metric: str
    subscriptions: tuple[str, ...]
    end: float


def metric_of(text: str) -> str:
    """The metric of a filter; "" if the filter names none."""
    match = _METRIC.search(text)
    return match[1] if match else ""


def read_backlog(query: Mapping[str, str]) -> BacklogQuery:
    """The query of a request for one of BACKLOG. Raises ApiError."""
    text = query.get("filter", "")
    match = _ONE_OF.fullmatch(text)
    if match is None:
        raise _unimplemented(f'the filter {text!r}; expected metric.type, resource.type and one_of("NAME", ...)')
    start, end = (_time(query, f"interval.{name}Time") for name in ("start", "end"))
    if start > end:
        raise _wrong("interval", f"{query['interval.startTime']} is after {query['interval.endTime']}")
    if aggregated := sorted(name for name in query if name.startswith("aggregation.")):
        raise _unimplemented(f"{', '.join(aggregated)} of this metric")
    return BacklogQuery(metric_of(text), tuple(re.findall(r'"([^"]*)"', match[1])), end)


def check_alerts(query: Mapping[str, str]) -> None:
    """The query of alerts.list. Raises ApiError.

    https://cloud.google.com/monitoring/api/ref_v3/rest/v3/projects.alerts/list
    """
    if query.get("filter") != 'state="OPEN"':
        raise _unimplemented(f'a list of alerts by the filter {query.get("filter")!r}; expected state="OPEN"')
    if other := sorted(query.keys() - {"filter", "pageSize"}):
        raise _unimplemented(f"a list of alerts with {', '.join(other)}")
    if not query.get("pageSize", "50").isdecimal():
        raise _wrong("page_size", repr(query["pageSize"]))


def read(query: Mapping[str, str], groups: Sequence[str]) -> Query:
    """The query of a request for the requests to Cloud Run. Raises ApiError."""
    metric, labels = _filter(query.get("filter", ""))
    start, end, names = _interval(query, groups, metric, REDUCERS[metric])
    if not set(names) <= GROUPS or "revision_name" not in names:
        raise _unimplemented(f"groups by {list(groups)}")
    return Query(metric, labels, start, end, names)


def read_balanced(query: Mapping[str, str], groups: Sequence[str]) -> tuple[Query, tuple[str, ...]]:
    """The query of a request for one of BALANCED, and the backends whose requests it counts. Raises ApiError."""
    text = query.get("filter", "")
    match, metric = _BACKENDS.fullmatch(text), metric_of(text)
    if match is None:
        raise _unimplemented(f'the filter {text!r}; expected metric.type, resource.type and one_of("NAME", ...)')
    start, end, names = _interval(query, groups, metric, BALANCED[metric])
    if not set(names) <= {"backend_name", "response_code_class"} or "backend_name" not in names:
        raise _unimplemented(f"groups by {list(groups)}")
    return Query(metric, {}, start, end, names), tuple(re.findall(r'"([^"]*)"', match[1]))


def _interval(
    query: Mapping[str, str], groups: Sequence[str], metric: str, reducer: str
) -> tuple[float, float, tuple[str, ...]]:
    """The times of a query, and the names of the labels by which it groups. Raises ApiError."""
    start, end = (_time(query, f"interval.{name}Time") for name in ("start", "end"))
    if start > end:
        raise _wrong("interval", f"{query['interval.startTime']} is after {query['interval.endTime']}")
    period = query.get("aggregation.alignmentPeriod", "")
    if not re.fullmatch(r"[0-9]+s", period) or int(period[:-1]) < LEAST_PERIOD:
        raise _wrong("aggregation.alignmentPeriod", f"{period!r}; expected at least {LEAST_PERIOD}s")
    if int(period[:-1]) < end - start:
        raise _unimplemented(f"an alignment period of {period} within an interval of {end - start:.0f} s")
    if query.get("aggregation.perSeriesAligner") != "ALIGN_DELTA":
        raise _unimplemented(f"the aligner {query.get('aggregation.perSeriesAligner')!r}")
    if query.get("aggregation.crossSeriesReducer") != reducer:
        raise _unimplemented(f"the reducer {query.get('aggregation.crossSeriesReducer')!r} of {metric}")
    return start, end, tuple(match[1] if (match := _GROUP.fullmatch(group)) else group for group in groups)


def _filter(text: str) -> tuple[str, dict[str, str]]:
    """The metric and the resource's labels of a filter: conditions joined by AND."""
    found: dict[str, str] = {}
    for condition in text.split(" AND "):
        match = _CONDITION.fullmatch(condition)
        if match is None:
            raise _wrong("filter", f'{condition!r}; this emulator takes NAME = "VALUE", joined by AND')
        found[f"{match[1]}.{match[2].replace('labels.', 'label.')}"] = match[3]
    metric, resource = found.pop("metric.type", ""), found.pop("resource.type", "cloud_run_revision")
    if metric not in REDUCERS or resource != "cloud_run_revision":
        raise _unimplemented(f"the metric {metric!r} of {resource!r}")
    labels = {name.removeprefix("resource.label."): value for name, value in found.items()}
    if not labels.keys() <= LABELS:
        raise _unimplemented(f"a filter by {sorted(found)}")
    return metric, labels


def _time(query: Mapping[str, str], name: str) -> float:
    try:
        return datetime.fromisoformat(query[name]).timestamp()
    except (KeyError, ValueError):
        raise _wrong(name, f"{query.get(name)!r}; expected a time of RFC 3339") from None


def _wrong(field: str, problem: str) -> ApiError:
    return ApiError("INVALID_ARGUMENT", f"Field {field} had an invalid value: {problem}.")


def _unimplemented(what: str) -> ApiError:
    return ApiError("UNIMPLEMENTED", f"{what} is not emulated")
