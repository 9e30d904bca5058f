"""What the functions answer the workflow: maps with a `status`; for failures, an `error` and whether to `retry`."""

from __future__ import annotations

from typing import Any

from .errors import ErrorClass
from .runs import Record, RunError
from .spec import JobSpec


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
    """A failure, to be tried again if its class allows it and attempts are left."""
    retry = failure.error_class.tries_again and record.attempt < spec.limits.max_attempts
    return failed(failure.error_class, failure.message, failure.hint, retry)


def error(error_class: ErrorClass, message: str, hint: str = "") -> dict[str, str]:
    return {"error_class": str(error_class), "message": message, "hint": hint}
