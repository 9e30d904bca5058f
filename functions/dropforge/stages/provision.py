"""Stage `provision`: advance a run towards a running attempt."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.log import log
from dropforge.base.settings import settings
from dropforge.money import paid_seconds
from dropforge.platforms import get_target
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.training import Launch
from dropforge.run.record import Attempt, Limit, Record, ResourceState, RunError, RunState, utc_now
from dropforge.run.store import RunStore, open_store
from dropforge.spec import JobSpec, seconds

from .admission import MIN_ATTEMPT_SECONDS
from .answers import failed, outcome_of, retry_or_fail, superseded, waiting
from .notify import announce

MAX_PAUSE_SECONDS = 600  # between two rounds of the placements
LOOK_SECONDS = 15  # how soon a cancel is seen while nothing is asked for
_TRAINS = frozenset({RunState.ACCEPTED, RunState.PROVISIONING, RunState.TRAINING})


def provision(run: str, execution: str, attempt: int) -> dict[str, Any]:
    """Make attempt `attempt` of a run exist, or report why it cannot. Raises NotFound for an unknown run.

    An execution that takes over a run begins with attempt 1: the answer says which one the run is at, or how it ended.
    Answers {"status": "RUNNING" | "PENDING" | "SUCCEEDED" | "FAILED" | "CANCELLED" | "SUPERSEDED", "attempt": int,
    ...}; see outcome.py.
    """
    store = open_store()
    spec = store.spec(run)
    record = store.update(run, lambda found: _claim(found, execution, attempt, spec))
    if record.execution != execution or record.state.is_terminal:
        return superseded(record)
    if record.state not in _TRAINS:  # also a call that comes late, which makes nothing
        return _gone_on(record)
    attempt = max(attempt, record.attempt)
    return {**_advance(store, record, spec, attempt), "attempt": attempt}


def _advance(store: RunStore, record: Record, spec: JobSpec, attempt: int) -> dict[str, Any]:
    run = record.run
    if record.cancel_requested:
        return failed(ErrorClass.CANCELLED, "cancelled while provisioning")
    if record.attempt != attempt:
        return _not_opened(record, spec)
    if ended := record.attempts[-1].error:
        return retry_or_fail(record, spec, ended)  # the reply was lost
    if record.attempts[-1].ended:
        return _running(record.attempts[-1])  # it has succeeded, as `inspect` will say again
    announce(record, RunState.PROVISIONING)
    try:
        return _launch(store, launch_of(record, spec), record.attempts[-1])
    except CloudError as error:
        waited = (utc_now() - record.attempts[-1].started).total_seconds()
        if error.error_class is ErrorClass.TRANSIENT and waited < settings().provision_deadline_seconds:
            raise
        log(error.message, stage="provision", run=run, severity="WARNING", error_class=error.error_class)
        why = RunError(error_class=error.error_class, message=error.message, hint=error.hint)
        # Noted, because the class decides where the next attempt goes, and because this one costs nothing any more.
        record = store.update(run, lambda found: found.with_end(attempt, why, utc_now()))
        return retry_or_fail(record, spec, why)


def _gone_on(record: Record) -> dict[str, Any]:
    """What an execution that takes over a run needs to go on from where it is."""
    if record.state is RunState.DEPLOYING:
        return {**_running(record.attempts[-1]), "attempt": record.attempt}
    outcome = outcome_of(record)
    error = outcome.error.model_dump(mode="json") if outcome.error else None
    # Past its gate, and past serving: what is left is to tear down, and to tell.
    return {"status": outcome.state, "error": error, "retry": False, "gate": {"passed": True}, "serve": False}


def _goes_on(launch: Launch) -> Callable[[Record], bool]:
    """Whether an attempt is still the one that a run is to train by."""

    def goes_on(record: Record) -> bool:
        latest = record.attempts[-1]
        return record.state in _TRAINS and latest.number == launch.attempt and latest.ended is None

    return goes_on


def _running(attempt: Attempt) -> dict[str, Any]:
    return {"status": "RUNNING", "deadline": attempt.deadline.timestamp()}


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
    resources = target.resources(launch)
    if not store.intend_all(launch.run, [(r.kind, r.name) for r in resources], launch.attempt, _goes_on(launch)):
        return superseded(store.record(launch.run))
    if not target.provision(launch):
        # A cluster of the attempt's own, or a machine that is made at once, takes its time: max_wait is for capacity.
        waited = (utc_now() - attempt.started).total_seconds()
        patience = max(attempt.max_wait_seconds or 0, launch.settings.provision_deadline_seconds)
        if waited > min(launch.timeout_seconds, patience):
            message = f"attempt {attempt.number} was not launched in {attempt.region} within {waited:.0f} s"
            raise CloudError(ErrorClass.STOCKOUT, message, "add placements in other regions")
        return {**waiting("PENDING", seconds=2), "deadline": attempt.deadline.timestamp()}
    for one in resources:
        if one.request:  # a node that a queue makes comes later
            store.note(launch.run, one.name, ResourceState.CREATED)
    log("launched", stage="provision", run=launch.run, attempt=launch.attempt)
    return _running(attempt)


def _claim(record: Record, execution: str, attempt: int, spec: JobSpec) -> Record:
    """Take the run for `execution` and open the attempt, unless either is settled already."""
    record = record.claimed(execution)
    if record.state.is_terminal or record.execution != execution or record.state not in _TRAINS:
        return record  # past this, or owned by another execution: a duplicate start, which ends here
    if record.cancel_requested:
        return record
    now = utc_now()
    if record.attempt >= attempt or pause_seconds(record, spec, now) > 0:
        return record
    opened = _open_attempt(record, attempt, spec, now)
    if opened is None:
        return record
    record = record.model_copy(update={"attempts": [*record.attempts, opened]})
    return record.entered(RunState.PROVISIONING, now)


def pause_seconds(record: Record, spec: JobSpec, now: datetime) -> float:
    """How long to ask for nothing, because every placement has refused since the last pause; 0: not at all."""
    last = record.attempts[-1] if record.attempts else None
    if last is None or last.ended is None or last.error is None or not last.error.error_class.moves_on:
        return 0.0
    rounds, rest = divmod(_moves(record), len(spec.target.placements))
    if rest:
        return 0.0
    pause = min(float(MAX_PAUSE_SECONDS), settings().capacity_pause_seconds * 2.0 ** (rounds - 1))
    return max(0.0, pause - (now - last.ended).total_seconds())


def _moves(record: Record) -> int:
    return sum(1 for a in record.attempts if a.error and a.error.error_class.moves_on)


def _open_attempt(record: Record, number: int, spec: JobSpec, now: datetime) -> Attempt | None:
    """The next attempt, at the placement whose turn it is; None when neither time nor money is left for it."""
    target = get_target(spec.target.type)
    regions = target.regions(spec)
    placement = _moves(record) % len(regions)
    price = target.price(spec, placement)
    deadline, limit = _deadline(record, spec, price, now)
    if (deadline - now).total_seconds() < MIN_ATTEMPT_SECONDS:
        return None
    max_wait = spec.target.placements[placement].max_wait
    return Attempt(
        number=number,
        placement=placement,
        region=regions[placement],
        started=now,
        deadline=deadline,
        limit=limit,
        usd_per_hour=price.usd_per_hour,
        max_wait_seconds=None if max_wait is None else seconds(max_wait),
    )


def _deadline(record: Record, spec: JobSpec, price: HourlyPrice, now: datetime) -> tuple[datetime, Limit]:
    """When an attempt that is opened now must have ended, and which limit says so: time or money."""
    ends = record.created + timedelta(seconds=seconds(spec.limits.max_duration))
    paid = paid_seconds(spec, price, record.training_cost(now) or 0.0)
    if paid is None or now + timedelta(seconds=paid) >= ends:
        return ends, "max_duration"
    return now + timedelta(seconds=paid), "max_cost_usd"


def _not_opened(record: Record, spec: JobSpec) -> dict[str, Any]:
    """Why there is no such attempt: a pause, or an end of time or money."""
    now = utc_now()
    if pause := pause_seconds(record, spec, now):
        ends = record.created + timedelta(seconds=seconds(spec.limits.max_duration))
        return {**waiting("PENDING", min(pause, LOOK_SECONDS)), "deadline": ends.timestamp()}
    price = get_target(spec.target.type).price(spec, _moves(record) % len(spec.target.placements))
    _, limit = _deadline(record, spec, price, now)
    found = ErrorClass.BUDGET if limit == "max_cost_usd" else ErrorClass.DEADLINE
    return failed(found, _nothing_left(record, spec), f"raise limits.{limit}; checkpoints are kept")


def _nothing_left(record: Record, spec: JobSpec) -> str:
    spent = record.training_cost(utc_now())
    cost = "unknown cost" if spent is None else f"{spent:.2f} USD"
    limits = f"{spec.limits.max_duration} and " + (
        "no budget" if spec.limits.max_cost_usd is None else f"{spec.limits.max_cost_usd:g} USD"
    )
    message = f"nothing is left for attempt {record.attempt + 1}: {cost} spent since {record.created:%H:%M:%S}"
    why = (
        f"; the last one: {record.attempts[-1].error.message}" if record.attempts and record.attempts[-1].error else ""
    )
    return f"{message}, of {limits}{why}"
