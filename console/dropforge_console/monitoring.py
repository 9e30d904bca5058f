"""What Cloud Monitoring says about a deployment: the dead letters, and the open alerts of the project.

Nobody pulls a message for this: that would take it from its other readers for a while.
https://cloud.google.com/monitoring/api/ref_v3/rest/v3/projects.timeSeries/list
https://cloud.google.com/monitoring/api/ref_v3/rest/v3/projects.alerts/list
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from dropforge.base.errors import DropforgeError
from dropforge.base.redact import cut, redact
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.context import Cloud

MESSAGES = "pubsub.googleapis.com/subscription/num_undelivered_messages"
AGE = "pubsub.googleapis.com/subscription/oldest_unacked_message_age"
INTERVAL = timedelta(minutes=10)  # Pub/Sub writes these metrics each minute, and they are visible after up to two
MOST_ALERTS = 100


class DeadLetters(NamedTuple):
    """The events in a subscription that no function could handle. `messages` None: Cloud Monitoring has no number.

    `oldest_seconds` is the age of the oldest event, None without an event.
    """

    subscription: str
    messages: int | None
    oldest_seconds: float | None


class Alert(NamedTuple):
    """An open alert of the project: the name of its policy, its severity, and when it opened."""

    policy: str
    severity: str
    opened: datetime


def dead_letters(cloud: Cloud) -> list[DeadLetters]:
    """Return the dead letters of each subscription of the deployment. Raises DropforgeError and requests' errors."""
    subscriptions = [name for name in cloud.settings.dead_letter_subscriptions.split(",") if name]
    if not subscriptions:
        return []
    messages, ages = _latest(cloud, MESSAGES, subscriptions), _latest(cloud, AGE, subscriptions)
    return [
        DeadLetters(name, messages.get(name), float(ages[name]) if messages.get(name) and name in ages else None)
        for name in subscriptions
    ]


def open_alerts(cloud: Cloud) -> list[Alert]:
    """Return the open alerts of the project, newest first. Raises DropforgeError and requests' errors."""
    answer = _get(cloud, "alerts", {"filter": 'state="OPEN"', "pageSize": MOST_ALERTS})
    found = [_alert(alert) for alert in answer.get("alerts", []) if alert.get("state") == "OPEN"]
    return sorted(found, key=lambda alert: alert.opened, reverse=True)


def _alert(alert: Mapping[str, Any]) -> Alert:
    policy = alert.get("policy", {})
    name = str(policy.get("displayName") or policy.get("name") or alert.get("name", ""))
    severity = str(policy.get("severity", "")).removeprefix("SEVERITY_").lower()
    return Alert(cut(redact(name), 200), severity, datetime.fromisoformat(alert["openTime"]))


def _latest(cloud: Cloud, metric: str, subscriptions: list[str]) -> dict[str, int]:
    """The newest value of a metric of each subscription that has one. Points come newest first."""
    now = cloud.clock.now()
    names = ", ".join(f'"{name}"' for name in subscriptions)
    conditions = [f'metric.type = "{metric}"', 'resource.type = "pubsub_subscription"']
    query = {
        "filter": " AND ".join([*conditions, f"resource.labels.subscription_id = one_of({names})"]),
        "interval.startTime": (now - INTERVAL).isoformat(),
        "interval.endTime": now.isoformat(),
    }
    series = _get(cloud, "timeSeries", query).get("timeSeries", [])
    return {
        each["resource"]["labels"]["subscription_id"]: int(each["points"][0]["value"]["int64Value"])
        for each in series
        if each.get("points")
    }


def _get(cloud: Cloud, method: str, query: Mapping[str, Any]) -> dict[str, Any]:
    session, url = cloud.clients.monitoring()
    answer = session.get(f"{url}/projects/{cloud.settings.project}/{method}", params=query, timeout=TIMEOUT_SECONDS)
    if answer.status_code != 200:
        raise DropforgeError(f"Cloud Monitoring answers {answer.status_code}: {cut(redact(_message(answer)), 300)}")
    content: dict[str, Any] = answer.json()
    return content


def _message(answer: Any) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(answer.text)
