"""What the functions answer the workflow: maps with a `status`; for failures, an `error` and whether to `retry`."""

from __future__ import annotations

from typing import Any

from dropforge.base.errors import ErrorClass
from dropforge.money import paid_seconds
from dropforge.platforms.prices import HourlyPrice
from dropforge.run.record import Outcome, Record, RunError, RunState, utc_now
from dropforge.spec import JobSpec, Limits

WORTH_SECONDS = 600  # of training that the budget still pays for: less is not worth another start


def waiting(status: str, seconds: float) -> dict[str, Any]:
    """Call again after `wait_seconds`, or when the callback comes."""
    return {"status": status, "wait_seconds": seconds}


def superseded(record: Record) -> dict[str, Any]:
    """This execution does not own the run: it ends without touching anything."""
    return {"status": "SUPERSEDED", "execution": record.execution, "state": record.state}


def failed(error_class: ErrorClass, message: str, hint: str = "", retry: bool = False) -> dict[str, Any]:
    """The attempt, and without `retry` the run, has failed."""
    status = "CANCELLED" if error_class is ErrorClass.CANCELLED else "FAILED"
    return {"status": status, "error": error(error_class, message, hint), "retry": retry}


def retry_or_fail(record: Record, spec: JobSpec, failure: RunError) -> dict[str, Any]:
    """A failure that the record notes as the end of its latest attempt; tried again if limits.retry allows it."""
    if (
        failure.error_class is ErrorClass.BUDGET
        and record.attempt < spec.limits.max_attempts
        and _is_paid(record, spec)
    ):
        return failed(failure.error_class, failure.message, failure.hint, retry=True)
    allowed = retries(spec.limits, failure.error_class)
    ended_so = sum(1 for a in record.attempts if a.error and a.error.error_class is failure.error_class)
    if ended_so <= allowed and record.attempt < spec.limits.max_attempts:
        return failed(failure.error_class, failure.message, failure.hint, retry=True)
    message = failure.message
    if allowed and record.attempt >= spec.limits.max_attempts:
        message += f"; that was attempt {record.attempt}, and limits.max_attempts is {spec.limits.max_attempts}"
    elif allowed:
        message += f"; {ended_so} attempts have ended so, and limits.retry.{failure.error_class} is {allowed}"
    return failed(failure.error_class, message, failure.hint)


def _is_paid(record: Record, spec: JobSpec) -> bool:
    """Whether money is left after an attempt that the budget has ended, because it waited for most of its time."""
    price = HourlyPrice(record.attempts[-1].usd_per_hour, None, "pinned")
    left = paid_seconds(spec, price, record.training_cost(utc_now()) or 0.0)
    return left is not None and left >= WORTH_SECONDS


def retries(limits: Limits, error_class: ErrorClass) -> int:
    """How many attempts that end so are followed by another one."""
    if error_class is ErrorClass.STUCK and limits.on_stuck != "restart":
        return 0
    return int(getattr(limits.retry, error_class, 0))


def outcome_of(record: Record) -> Outcome:
    """How a run that is being torn down ends. Without a note of that, by what is known of it."""
    if record.outcome is not None:
        return record.outcome
    if record.cancel_requested:
        return Outcome(state=RunState.CANCELLED)
    lost = RunError(error_class=ErrorClass.INFRASTRUCTURE, message="the run's execution was lost while it tore down")
    return Outcome(state=RunState.FAILED, error=(record.attempts[-1].error if record.attempts else None) or lost)


def error(error_class: ErrorClass, message: str, hint: str = "") -> dict[str, str]:
    return {"error_class": str(error_class), "message": message, "hint": hint}
