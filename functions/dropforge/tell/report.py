"""The report of a finished run, and the cost of a run."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from dropforge.run.record import Record
from dropforge.spec import JobSpec


def report(record: Record, spec: JobSpec, now: datetime) -> dict[str, Any]:
    """The content of report.json: the result of a run on one page, for people and for scripts."""
    kept = record.model_dump(mode="json", include={"run", "name", "source", "state", "created", "attempts", "metrics"})
    return {
        **kept,
        "ended": record.history[-1].time.isoformat(),
        "seconds_per_stage": record.stage_seconds(now),
        "cost_usd": cost(record, now),
        "endpoint": _endpoint(record, spec),
        "parity": record.parity.model_dump(mode="json") if record.parity else None,
        "error": record.error.model_dump(mode="json") if record.error else None,
        "spec": spec.model_dump(mode="json", by_alias=True),
    }


def _endpoint(record: Record, spec: JobSpec) -> dict[str, Any] | None:
    """The endpoint with the values for a client of the OpenAI API, and the token that a request needs."""
    if record.endpoint is None or spec.serve is None:
        return None
    calling = {"base_url": record.endpoint.base_url, "credential": spec.serve.credential}
    return {**record.endpoint.model_dump(mode="json"), **calling}


def cost(record: Record, now: datetime) -> dict[str, Any]:
    """The cost of a run by part, in US dollars, and the highest further cost of the endpoint; null without a price.

    `per_hour_at_most` is what it costs now. `endpoint_at_most` is the cost so far if all instances ran all the time;
    `endpoint_until_it_expires` is the same sum at the endpoint's expiry.
    """
    lasts = record.endpoint.expires if record.endpoint and not record.endpoint.ended else now
    return {
        "attempts": [None if (usd := a.cost(now)) is None else round(usd, 6) for a in record.attempts],
        "per_hour_at_most": record.hourly_cost(now),
        "training": record.training_cost(now),
        "endpoint_at_most": record.serving_cost(now),
        "endpoint_until_it_expires": record.serving_cost(lasts),
        "total_at_most": record.cost(lasts),
    }
