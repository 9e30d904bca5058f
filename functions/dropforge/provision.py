"""Stage `provision`: advance a run towards a running attempt."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from .admission import MIN_ATTEMPT_SECONDS, training_seconds
from .errors import CloudError, ErrorClass
from .log import log
from .notify import announce
from .outcome import failed, retry_or_fail, superseded, waiting
from .runs import Attempt, Record, RunError, RunState, RunStore, open_store, utc_now
from .settings import settings
from .spec import JobSpec, seconds
from .targets import get_target
from .targets.base import Launch

_TRAINS = frozenset({RunState.ACCEPTED, RunState.PROVISIONING, RunState.TRAINING})


def provision(run: str, execution: str, attempt: int) -> dict[str, Any]:
    """Make attempt `attempt` of a run exist, or report why it cannot. Raises NotFound for an unknown run.

    Answers {"status": "RUNNING" | "PENDING" | "FAILED" | "CANCELLED" | "SUPERSEDED", ...}; see outcome.py.
    """
    store = open_store()
    spec = store.spec(run)
    record = store.update(run, lambda found: _claim(found, execution, attempt, spec))
    if record.execution != execution or record.state not in _TRAINS or record.attempt > attempt:
        return superseded(record)  # also a call that comes late: after teardown, it would make what nobody deletes
    if record.cancel_requested:
        return failed(ErrorClass.CANCELLED, "cancelled while provisioning")
    if record.attempt != attempt:
        return failed(
            ErrorClass.DEADLINE, _no_time_left(record, spec), "raise limits.max_duration or limits.max_cost_usd"
        )
    if ended := record.attempts[-1].error:
        return retry_or_fail(record, spec, ended)  # the reply was lost
    announce(record, RunState.PROVISIONING)
    try:
        return _launch(store, launch_of(record, spec), record.attempts[-1])
    except CloudError as error:
        if error.error_class is ErrorClass.TRANSIENT:
            raise
        log(error.message, stage="provision", run=run, severity="WARNING", error_class=error.error_class)
        why = RunError(error_class=error.error_class, message=error.message, hint=error.hint)
        # Noted, because the class decides where the next attempt goes, and because this one costs nothing any more.
        record = store.update(run, lambda found: found.with_end(attempt, why, utc_now()))
        return retry_or_fail(record, spec, why)


def launch_of(record: Record, spec: JobSpec) -> Launch:
    """The latest attempt of a record, as its target sees it."""
    attempt = record.attempts[-1]
    return Launch(
        run=record.run,
        attempt=attempt.number,
        placement=attempt.placement,
        spec=spec,
        settings=settings(),
        deadline=attempt.deadline,
        timeout_seconds=max(1, int((attempt.deadline - attempt.started).total_seconds())),
    )


def _launch(store: RunStore, launch: Launch, attempt: Attempt) -> dict[str, Any]:
    target = get_target(launch.spec.target.type)
    for resource in target.resources(launch):
        store.intend(launch.run, resource.kind, resource.name, launch.attempt)
    if not target.provision(launch):
        waited = (utc_now() - attempt.started).total_seconds()
        if waited > min(launch.timeout_seconds, attempt.max_wait_seconds or launch.settings.provision_deadline_seconds):
            message = f"attempt {attempt.number} was not launched in {attempt.region} within {waited:.0f} s"
            raise CloudError(ErrorClass.STOCKOUT, message, "add placements in other regions")
        return waiting("PENDING", seconds=2)
    log("launched", stage="provision", run=launch.run, attempt=launch.attempt)
    return {"status": "RUNNING"}


def _claim(record: Record, execution: str, attempt: int, spec: JobSpec) -> Record:
    """Take the run for `execution` and open the attempt, unless either is settled already."""
    if record.state.is_terminal or record.execution not in (None, execution):
        return record  # over, or owned by another execution: a duplicate start, which ends here
    if record.execution is None:
        record = record.model_copy(update={"execution": execution})
    if record.cancel_requested:
        return record
    now = utc_now()
    opened = None if record.attempt >= attempt else _open_attempt(record, attempt, spec, now)
    if opened is None:
        return record
    record = record.model_copy(update={"attempts": [*record.attempts, opened]})
    return record.entered(RunState.PROVISIONING, now)


def _open_attempt(record: Record, number: int, spec: JobSpec, now: datetime) -> Attempt | None:
    """The next attempt, at the placement whose turn it is; None when neither time nor money is left for it."""
    target = get_target(spec.target.type)
    regions = target.regions(spec)
    moves = sum(1 for a in record.attempts if a.error and a.error.error_class.moves_on)
    placement = moves % len(regions)
    price = target.price(spec, placement)
    ends = record.created + timedelta(seconds=seconds(spec.limits.max_duration))
    allowed = training_seconds(spec, price, record.training_cost(now) or 0.0)
    deadline = min(ends, now + timedelta(seconds=allowed))
    if (deadline - now).total_seconds() < MIN_ATTEMPT_SECONDS:
        return None
    max_wait = spec.target.placements[placement].max_wait
    return Attempt(
        number=number,
        placement=placement,
        region=regions[placement],
        started=now,
        deadline=deadline,
        usd_per_hour=price.usd_per_hour,
        max_wait_seconds=None if max_wait is None else seconds(max_wait),
    )


def _no_time_left(record: Record, spec: JobSpec) -> str:
    spent = record.training_cost(utc_now())
    cost = "unknown cost" if spent is None else f"{spent:.2f} USD"
    limits = f"{spec.limits.max_cost_usd} USD and {spec.limits.max_duration}"
    return (
        f"no time is left for attempt {record.attempt + 1}: {cost} spent since {record.created:%H:%M:%S}, of {limits}"
    )
