"""The limits of a spec in numbers: how long a run may train and serve, how much it has used, and when to warn people.

The record notes each price when the attempt or the endpoint begins. Time that a machine may have used counts as
used: each sum is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from dropforge.platforms import get_server, get_target
from dropforge.platforms.prices import SECONDS_PER_HOUR, HourlyPrice
from dropforge.run.record import Attempt, Notice, Record
from dropforge.spec import JobSpec, seconds, serving_seconds

MIN_ATTEMPT_SECONDS = 60  # the shortest time for which starting a machine is worthwhile
# The shortest endpoint that is worth starting: training may not spend its price.
MIN_ENDPOINT_SECONDS = 600
WARN_AT = (50, 80)  # percent of limits.max_cost_usd
WARN_OF_TIME_AT = 80  # percent of limits.max_duration
_ROUNDING_USD = 1e-6  # sums of floats differ from the price on paper
_STOPPED = "it is stopped, and its checkpoints are kept"


def serving_price(spec: JobSpec, placement: int | None = None) -> HourlyPrice:
    """The hourly price of the endpoint with its maximum number of instances. The spec must serve.

    `placement` is that of the attempt that trained, None before one has.
    """
    assert spec.serve is not None, "the caller passes only specs that serve"
    return get_server(spec.serve.type).price(spec, placement).times(spec.serve.max_instances)


def training_budget(spec: JobSpec) -> float | None:
    """US dollars that training may cost: the budget minus the price of the shortest endpoint; None without a budget."""
    budget = spec.limits.max_cost_usd
    if budget is None or spec.serve is None:
        return budget
    hourly = serving_price(spec).usd_per_hour or 0.0
    return budget - hourly * MIN_ENDPOINT_SECONDS / SECONDS_PER_HOUR


def paid_seconds(spec: JobSpec, price: HourlyPrice, spent_usd: float = 0.0) -> int | None:
    """How many seconds of training the budget pays for at `price`; None without a budget or a known price."""
    budget = training_budget(spec)
    if budget is None or price.usd_per_hour is None:
        return None
    return max(0, int((budget - spent_usd) / price.usd_per_hour * SECONDS_PER_HOUR))


def training_seconds(spec: JobSpec, price: HourlyPrice) -> int:
    """How many seconds the first attempt may take: max_duration, or less if the budget pays for less."""
    allowed, paid = seconds(spec.limits.max_duration), paid_seconds(spec, price)
    return allowed if paid is None else min(allowed, paid)


def endpoint_seconds(spec: JobSpec, usd_per_hour: float | None, spent_usd: float = 0.0) -> int:
    """Seconds for which the endpoint may exist: its startup time-out and its ttl, or less if the budget pays for less.

    `usd_per_hour` is the price of all its instances. An endpoint that scales to zero costs less, but nobody knows
    beforehand how much less.
    """
    assert spec.serve is not None, "the caller passes only specs that serve"
    allowed = serving_seconds(spec.serve)
    if spec.limits.max_cost_usd is None or not usd_per_hour:
        return allowed
    left = max(0.0, spec.limits.max_cost_usd - spent_usd)
    return min(allowed, int(left / usd_per_hour * SECONDS_PER_HOUR))


def most_usd(spec: JobSpec) -> float | None:
    """US dollars that a run may cost at most: at its dearest placement, with all instances of its endpoint.

    None if a price is unknown. The budget is an upper bound.
    """
    target = get_target(spec.target.type)
    prices = [target.price(spec, placement) for placement in range(len(target.regions(spec)))]
    used = [(price.usd_per_hour, training_seconds(spec, price)) for price in prices]
    serving = 0.0
    if spec.serve is not None:
        hourly = serving_price(spec).usd_per_hour
        if hourly is None:
            return None
        serving = hourly * endpoint_seconds(spec, hourly) / SECONDS_PER_HOUR
    training = [hourly * length / SECONDS_PER_HOUR for hourly, length in used if hourly is not None]
    if len(training) < len(used):
        return None
    total = max(training) + serving
    return min(total, spec.limits.max_cost_usd or total)


def endpoint_expiry(record: Record, spec: JobSpec, began: datetime) -> datetime:
    """When an endpoint that began at `began` must end, at the price that the record noted then."""
    spent = record.training_cost(began) or 0.0
    return began + timedelta(seconds=endpoint_seconds(spec, record.serving_usd_per_hour, spent))


def kept_until(record: Record, spec: JobSpec) -> datetime:
    """The expiry label that the training VM got at its creation, if it serves; unbounded for other endpoints."""
    if spec.serve is None or not spec.serve.keeps_machine:
        return datetime.max.replace(tzinfo=UTC)
    return record.attempts[-1].deadline + timedelta(seconds=serving_seconds(spec.serve))


def short_endpoint(spec: JobSpec) -> str:
    """How far the budget may shorten the endpoint's ttl, as text for people before the run; "" if it pays for the ttl.

    The budget must pay for the ttl even if training uses all its time at the most expensive placement.
    """
    budget = spec.limits.max_cost_usd
    if budget is None or spec.serve is None:
        return ""
    target, hourly = get_target(spec.target.type), serving_price(spec).usd_per_hour
    prices = [target.price(spec, placement).usd_per_hour for placement in range(len(target.regions(spec)))]
    if hourly is None or None in prices:
        return ""  # admission refuses a budget without prices
    training = max(price or 0.0 for price in prices) * seconds(spec.limits.max_duration) / SECONDS_PER_HOUR
    needed = training + hourly * serving_seconds(spec.serve) / SECONDS_PER_HOUR
    if needed <= budget + _ROUNDING_USD:
        return ""
    at_most = endpoint_seconds(spec, hourly)
    at_least = max(endpoint_seconds(spec, hourly, training), min(at_most, MIN_ENDPOINT_SECONDS))
    counted = "which counts as running all the time"
    if spec.serve.max_instances > 1:
        counted = f"all {spec.serve.max_instances} instances of which count as running all the time"
    return (
        f"the budget of {budget:g} USD may end the endpoint before its ttl of {spec.serve.ttl}: it pays for "
        f"{_time(at_most)} of the endpoint, {counted}, or {_time(at_least)} when training takes all of its "
        f"{spec.limits.max_duration}; {math.ceil(needed * 100) / 100:.2f} USD pay for all of it"
    )


def _time(length: float) -> str:
    return f"{length / SECONDS_PER_HOUR:.1f} h" if length >= SECONDS_PER_HOUR else f"{length / 60:.0f} min"


def running_since(attempt: Attempt) -> datetime:
    """The earliest start of a running attempt: no call saw the attempt running before that time."""
    return attempt.waiting or attempt.started


def due(record: Record, spec: JobSpec, now: datetime) -> Iterator[Notice]:
    """The warnings about money and time of a training run that were not sent yet."""
    yield from due_of_budget(record, spec, now)
    used, key = (now - record.began).total_seconds(), f"time-{WARN_OF_TIME_AT}"
    if used >= seconds(spec.limits.max_duration) * WARN_OF_TIME_AT / 100 and key not in record.notices:
        text = f"max_duration is {spec.limits.max_duration}; at 100 % {_STOPPED}"
        yield Notice(key, f"has used {WARN_OF_TIME_AT} % of its time", text)


def due_of_budget(record: Record, spec: JobSpec, now: datetime) -> Iterator[Notice]:
    """The latest warning about money of a run that trains or serves, unless it was sent."""
    budget, spent = spec.limits.max_cost_usd, record.cost(now)
    if budget is None or spent is None:
        return
    passed = [percent for percent in WARN_AT if spent >= budget * percent / 100]
    if passed and f"budget-{passed[-1]}" not in record.notices:
        end = "the endpoint is deleted, and the model is kept" if record.endpoint else _STOPPED
        text = f"{spent:.2f} of {budget:g} USD are spent; at 100 % {end}"
        yield Notice(f"budget-{passed[-1]}", f"has used {passed[-1]} % of its budget", text)


def seconds_to_warning(record: Record, spec: JobSpec, now: datetime) -> float:
    """Seconds until the next warning is due if the present attempt continues; infinite if no warning follows."""
    waits = []
    budget, spent, hourly = spec.limits.max_cost_usd, record.cost(now), record.attempts[-1].usd_per_hour
    if budget is not None and spent is not None and hourly:
        waits += [(budget * percent / 100 - spent) / hourly * SECONDS_PER_HOUR for percent in WARN_AT]
    used = (now - record.began).total_seconds()
    waits.append(seconds(spec.limits.max_duration) * WARN_OF_TIME_AT / 100 - used)
    return min((wait for wait in waits if wait > 0), default=float("inf"))
