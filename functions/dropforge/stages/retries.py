"""Whether another attempt follows a failed attempt. `limits.retry` of the spec decides; no other rule does."""

from __future__ import annotations

from datetime import datetime

from dropforge.base.errors import ErrorClass
from dropforge.money.limits import paid_seconds
from dropforge.platforms.prices import HourlyPrice
from dropforge.run.record import Record, RunError
from dropforge.spec import JobSpec, Limits

from .answers import Failed, failed

WORTH_SECONDS = 600  # the shortest training time, paid by the budget, for which another start is worthwhile


def retry_or_fail(record: Record, spec: JobSpec, failure: RunError, now: datetime) -> Failed:
    """The answer to `failure`, which the record notes as the end of its latest attempt."""
    if _may_retry(record, spec, failure.error_class, now):
        return failed(failure.error_class, failure.message, failure.hint, retry=True)
    return failed(failure.error_class, failure.message + _exhausted(record, spec, failure.error_class), failure.hint)


def retries(limits: Limits, error_class: ErrorClass) -> int:
    """How many attempts that end with an error class are followed by another attempt."""
    if error_class is ErrorClass.STUCK and limits.on_stuck != "restart":
        return 0
    return int(getattr(limits.retry, error_class, 0))


def _may_retry(record: Record, spec: JobSpec, error_class: ErrorClass, now: datetime) -> bool:
    if record.attempt >= spec.limits.max_attempts:
        return False
    if error_class is ErrorClass.BUDGET and _is_paid(record, spec, now):
        return True
    return _ended_with(record, error_class) <= retries(spec.limits, error_class)


def _exhausted(record: Record, spec: JobSpec, error_class: ErrorClass) -> str:
    """Which limit forbids another attempt of a class that `limits.retry` retries; "" for other classes."""
    allowed = retries(spec.limits, error_class)
    if not allowed:
        return ""
    if record.attempt >= spec.limits.max_attempts:
        return f"; that was attempt {record.attempt}, and limits.max_attempts is {spec.limits.max_attempts}"
    ended = _ended_with(record, error_class)
    return f"; {ended} attempts have ended so, and limits.retry.{error_class} is {allowed}"


def _ended_with(record: Record, error_class: ErrorClass) -> int:
    return sum(1 for a in record.attempts if a.error and a.error.error_class is error_class)


def _is_paid(record: Record, spec: JobSpec, now: datetime) -> bool:
    """Whether the budget still pays for training, after an attempt at its budget limit that mostly waited."""
    price = HourlyPrice(record.attempts[-1].usd_per_hour, None, "pinned")
    seconds = paid_seconds(spec, price, record.training_cost(now) or 0.0)
    return seconds is not None and seconds >= WORTH_SECONDS
