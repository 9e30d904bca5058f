"""Stage `provision`: advance a run towards a running attempt."""

from __future__ import annotations

from datetime import datetime, timedelta

from dropforge.base.changes import evolve
from dropforge.base.errors import CloudError, ErrorClass, OverQuota
from dropforge.base.settings import Settings
from dropforge.context import Context
from dropforge.money.limits import MIN_ATTEMPT_SECONDS, paid_seconds
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.training import NO_KEY, Launch, Waits, launch_of
from dropforge.run.record import WAITING_SECONDS, Attempt, Limit, Outcome, Record, RunError, RunState
from dropforge.spec import JobSpec, seconds
from dropforge.tell.run_events import announce

from .answers import Cancelled, Failed, Gate, Pending, Running, Succeeded, Superseded, failed, superseded
from .looks import LONGEST_SECONDS, SHORTEST_SECONDS, next_look, next_turn
from .places import wait_for_place
from .retries import retry_or_fail
from .waits import cancelled_while, note_refusal, note_wait, warn_of_wait

MAX_PAUSE_SECONDS = 600  # between two rounds of the placements
REFUSED_SECONDS = 300  # of temporary refusals in one placement, while another has not refused yet
_TRAINS = frozenset({RunState.ACCEPTED, RunState.PROVISIONING, RunState.TRAINING})

ProvisionAnswer = Running | Pending | Succeeded | Failed | Superseded


def provision(context: Context, run: str, execution: str, attempt: int, callback_url: str = "") -> ProvisionAnswer:
    """Create attempt `attempt` of a run, or say why it cannot exist. Raises NotFound for an unknown run.

    An execution that takes over a run starts with attempt 1: the answer names the run's present attempt, or the run's
    outcome. The record gets the callback of the execution before the attempt can send an event.
    """
    spec = context.store.spec(run)
    if waiting := wait_for_place(context, run, execution, spec):
        return waiting

    asked = context.now()

    def claim(latest: Record) -> Record:
        claimed = _claim(context, latest, execution, attempt, spec, asked)
        if callback_url:
            claimed = claimed.with_callback(execution, callback_url)
        return _with_intents(context, claimed, execution, spec)

    record = context.store.update(run, claim)
    if record.execution != execution or record.state.is_terminal:
        return superseded(record)
    if record.state not in _TRAINS:  # a late call, or a takeover after the training: nothing is created
        return takeover_answer(record)
    attempt = max(attempt, record.attempt)
    return evolve(_advance(context, record, spec, attempt, asked), attempt=attempt)


def takeover_answer(record: Record) -> Running | Succeeded | Failed:
    """The answer from which an execution that takes over a trained run continues at the run's present state."""
    if record.state is RunState.DEPLOYING:
        return _running(record.attempts[-1])
    outcome = _outcome_of(record)
    if outcome.state is RunState.SUCCEEDED:
        # The run has passed its gate and its endpoint was ready: only teardown and notify are left.
        return Succeeded(gate=Gate(passed=True), serve=False)
    answer = Cancelled if outcome.state is RunState.CANCELLED else Failed
    return answer(error=outcome.error, retry=False)


def pause_seconds(record: Record, spec: JobSpec, settings: Settings, now: datetime) -> float:
    """How long to request nothing, because every placement has refused since the last pause; 0: no pause."""
    last = record.attempts[-1] if record.attempts else None
    if last is None or last.ended is None or not last.moves_on:
        return 0.0
    rounds, rest = divmod(_moves(record), len(spec.target.placements))
    if rest:
        return 0.0
    pause = min(float(MAX_PAUSE_SECONDS), settings.capacity_pause_seconds * 2.0 ** (rounds - 1))
    return max(0.0, pause - (now - last.ended).total_seconds())


def _claim(context: Context, record: Record, execution: str, attempt: int, spec: JobSpec, now: datetime) -> Record:
    """The record with `execution` as its owner and with the attempt opened, unless either is settled already."""
    record = record.claimed(execution)
    if record.state.is_terminal or record.execution != execution or record.state not in _TRAINS:
        return record  # the training is over, or this is a duplicate start: another execution owns the run
    if record.cancel_requested:
        return record
    record = _asking_again(record, spec, now)
    if record.attempt >= attempt or pause_seconds(record, spec, context.settings, now) > 0:
        return record
    opened = _open_attempt(context, record, attempt, spec, now)
    if opened is None:
        return record
    record = evolve(record, attempts=[*record.attempts, opened])
    return record.entered(RunState.PROVISIONING, now)


def _asking_again(record: Record, spec: JobSpec, now: datetime) -> Record:
    """The record before another request of an attempt that has nothing: its time and money begin now."""
    latest = record.attempts[-1] if record.attempts else None
    if latest is None or latest.ended or not latest.refused:
        return record
    deadline, limit = _deadline(record, spec, HourlyPrice(latest.usd_per_hour, None, "pinned"), now)
    return record.with_request(latest.number, now, deadline, limit)


def _with_intents(context: Context, record: Record, execution: str, spec: JobSpec) -> Record:
    """The record with the intent to create the resources of its latest attempt: owner, attempt and intent in one write.

    An intent is written before the create call. A run that is cancelled, or that trains no more, creates nothing.
    """
    if record.execution != execution or record.state not in _TRAINS or record.cancel_requested or not record.attempts:
        return record
    latest = record.attempts[-1]
    if latest.ended is not None:
        return record
    resources = _resources(context, launch_of(record, spec, context.settings, key=NO_KEY))
    return record.with_ledger(lambda ledger: ledger.with_intents(resources, latest.number, context.now()))


def _resources(context: Context, launch: Launch) -> list[tuple[str, str]]:
    """Kind and name of each resource of an attempt."""
    target = context.platforms.target(launch.spec.target.type)
    return [(resource.kind, resource.name) for resource in target.resources(launch)]


def _open_attempt(context: Context, record: Record, number: int, spec: JobSpec, now: datetime) -> Attempt | None:
    """The next attempt, at the next placement; None if no time or no money is left."""
    target = context.platforms.target(spec.target.type)
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


def _advance(
    context: Context, record: Record, spec: JobSpec, attempt: int, asked: datetime
) -> Running | Pending | Failed:
    if record.cancel_requested:
        return failed(ErrorClass.CANCELLED, cancelled_while(record.wait_reason, "provisioning"))
    if record.attempt != attempt:
        return _not_opened(context, record, spec)
    latest = record.attempts[-1]
    if latest.error:
        return retry_or_fail(record, spec, latest.error, context.now())  # an earlier reply was lost
    if latest.ended:
        return _running(latest)  # the attempt has succeeded; `inspect` reports the success again
    announce(context, record, RunState.PROVISIONING)
    try:
        return _launch(
            context, record, launch_of(record, spec, context.settings, key=context.store.key(record.run)), asked
        )
    except CloudError as error:
        return _refused(context, record, spec, error, asked)


def _refused(context: Context, record: Record, spec: JobSpec, error: CloudError, asked: datetime) -> Failed:
    """End the attempt after a permanent error; raise a temporary error again until the provision deadline.

    If there is a placement that has not refused yet, a temporary refusal has REFUSED_SECONDS to pass.
    """
    latest, is_nothing = record.attempts[-1], error.did_nothing and _has_nothing(record.attempts[-1], asked)
    waited, patience = (context.now() - latest.started).total_seconds(), context.settings.provision_deadline_seconds
    if is_nothing and _has_untried_placement(record, spec):
        patience = min(patience, REFUSED_SECONDS)
    if error.error_class is ErrorClass.TRANSIENT and waited < patience:
        warn_of_wait(context, note_refusal(context, record, error.message, nothing_exists=is_nothing), spec)
        raise error
    context.log(error.message, stage="provision", run=record.run, severity="WARNING", error_class=error.error_class)
    reason = RunError(error_class=error.error_class, message=error.message, hint=error.hint)

    # The record keeps the reason: its class decides the next placement, and the end stops the cost of the attempt.
    def end(latest_record: Record) -> Record:
        noted = latest_record.with_refusal(latest.number) if is_nothing else latest_record
        return noted.with_end(latest.number, reason, context.now())

    record = context.store.update(record.run, end)
    return retry_or_fail(record, spec, reason, context.now())


def _has_nothing(attempt: Attempt, asked: datetime) -> bool:
    """Whether the call that began at `asked` made the only request of an attempt that may have had an effect."""
    return asked in (attempt.started, attempt.waiting)


def _launch(context: Context, record: Record, launch: Launch, asked: datetime) -> Running | Pending:
    """Create the resources of an attempt, whose intents the record has."""
    store, target, attempt = context.store, context.platforms.target(launch.spec.target.type), record.attempts[-1]
    turn, is_sure, is_refused = 0.0, True, False
    try:
        waits = target.provision(context.cloud, launch)
    except OverQuota as refused:
        if refused.error_class.moves_on and _has_untried_placement(record, launch.spec):
            raise
        # Many runs may wait for the same quota, and each request counts for the rate: the longer, the rarer.
        waits, turn = Waits(refused.message), next_turn((asked - record.began).total_seconds(), LONGEST_SECONDS)
        is_sure, is_refused = refused.is_sure, _has_nothing(attempt, asked)
    if waits:
        if is_refused:
            record = note_refusal(context, record, waits.reason, nothing_exists=True)
        elif is_sure:  # no machine was running when the cloud answered, so the cost counts from then at the earliest
            record = note_wait(context, record, waits.reason, asked)
        record = warn_of_wait(context, record, launch.spec)
        # Creating a cluster of the attempt, or a machine without a queue, takes time; max_wait is for capacity only.
        waited = (context.now() - attempt.started).total_seconds()
        patience = max(attempt.max_wait_seconds or 0, launch.settings.provision_deadline_seconds)
        if waited > min(launch.timeout_seconds, patience):
            message = f"attempt {attempt.number} was not launched in {attempt.region} within {waited:.0f} s"
            message += f": {record.wait_reason}" * bool(record.wait_reason)
            raise CloudError(ErrorClass.STOCKOUT, message, "add placements in other regions")
        usual = max((context.platforms.usual(kind).creation for kind, _ in _resources(context, launch)), default=0.0)
        return Pending(wait_seconds=max(turn, next_look(waited, usual)), deadline=attempt.deadline.timestamp())
    now = context.now()
    if now - attempt.started >= timedelta(seconds=WAITING_SECONDS):  # before that, the start says about the same
        store.update(launch.run, lambda latest: latest.with_launch(launch.attempt, now))
    context.log("launched", stage="provision", run=launch.run, attempt=launch.attempt)
    return _running(attempt)


def _running(attempt: Attempt) -> Running:
    # Many problems of an attempt show as soon as it is launched.
    return Running(deadline=attempt.deadline.timestamp(), attempt=attempt.number, wait_seconds=SHORTEST_SECONDS)


def _has_untried_placement(record: Record, spec: JobSpec) -> bool:
    """Whether a later placement has refused no attempt of the run yet."""
    return _moves(record) + 1 < len(spec.target.placements)


def _moves(record: Record) -> int:
    """How many attempts ended so that the next placement is used."""
    return sum(1 for a in record.attempts if a.moves_on)


def _deadline(record: Record, spec: JobSpec, price: HourlyPrice, now: datetime) -> tuple[datetime, Limit]:
    """When an attempt that is opened now must end, and the limit that decides it: time or money."""
    ends = record.began + timedelta(seconds=seconds(spec.limits.max_duration))
    paid = paid_seconds(spec, price, record.training_cost(now) or 0.0)
    if paid is None or now + timedelta(seconds=paid) >= ends:
        return ends, "max_duration"
    return now + timedelta(seconds=paid), "max_cost_usd"


def _not_opened(context: Context, record: Record, spec: JobSpec) -> Pending | Failed:
    """Why the attempt was not opened: a pause, or no time or money is left."""
    now = context.now()
    if pause := pause_seconds(record, spec, context.settings, now):
        ends = record.began + timedelta(seconds=seconds(spec.limits.max_duration))
        return Pending(wait_seconds=min(pause, LONGEST_SECONDS), deadline=ends.timestamp())
    target = context.platforms.target(spec.target.type)
    price = target.price(spec, _moves(record) % len(spec.target.placements))
    _, limit = _deadline(record, spec, price, now)
    error_class = ErrorClass.BUDGET if limit == "max_cost_usd" else ErrorClass.DEADLINE
    return failed(error_class, _nothing_left(record, spec, now), f"raise limits.{limit}; checkpoints are kept")


def _nothing_left(record: Record, spec: JobSpec, now: datetime) -> str:
    spent = record.training_cost(now)
    cost = "unknown cost" if spent is None else f"{spent:.2f} USD"
    limits = f"{spec.limits.max_duration} and " + (
        "no budget" if spec.limits.max_cost_usd is None else f"{spec.limits.max_cost_usd:g} USD"
    )
    message = f"nothing is left for attempt {record.attempt + 1}: {cost} spent since {record.began:%H:%M:%S}"
    last = record.attempts[-1].error if record.attempts else None
    return f"{message}, of {limits}" + (f"; the last attempt: {last.message}" if last else "")


def _outcome_of(record: Record) -> Outcome:
    """How a run in teardown ends. Without a noted outcome, the record's other facts decide."""
    if record.outcome is not None:
        return record.outcome
    if record.cancel_requested:
        return Outcome(state=RunState.CANCELLED)
    lost = RunError(error_class=ErrorClass.INFRASTRUCTURE, message="the run's execution was lost during the teardown")
    return Outcome(state=RunState.FAILED, error=(record.attempts[-1].error if record.attempts else None) or lost)
