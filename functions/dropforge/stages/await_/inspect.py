"""Stage `await`: one look at an attempt, at its events, the bucket and the cloud.

Two paths lead here: the callback that a job event triggers, and the time-out of the workflow's wait. Either path alone
is enough.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from dropforge.base.changes import evolve
from dropforge.base.errors import CloudError, DropforgeError, ErrorClass
from dropforge.context import Context
from dropforge.money.limits import due, running_since, seconds_to_warning
from dropforge.platforms.training import NO_KEY, Phase, Status, launch_of
from dropforge.run.artifacts import Manifest, read_manifest
from dropforge.run.events import Checkpointed, read_job_events
from dropforge.run.record import Notice, Outcome, Record, RunError, RunState
from dropforge.run.standstill import standstill
from dropforge.run.store import RunStore
from dropforge.spec import JobSpec
from dropforge.stages.answers import Failed, Gate, Succeeded, Superseded, Waiting, failed, superseded
from dropforge.stages.looks import next_reason
from dropforge.stages.retries import retry_or_fail
from dropforge.stages.waits import cancelled_while, note_wait, warn_of_wait
from dropforge.tell import notices
from dropforge.tell.everybody import tell, warn

from .decide import Heard, Verdict, decide, hear

InspectAnswer = Waiting | Succeeded | Failed | Superseded


def inspect(context: Context, run: str, execution: str, attempt: int, callback_url: str) -> InspectAnswer:
    """Note the callback, then look at an attempt once. Raises NotFound for an unknown run."""
    store = context.store

    def note_callback(record: Record) -> Record:
        return _with_callback(record, execution, attempt, callback_url)

    known = store.known(run)
    is_known = known is not None and _is_waiting(known, execution, attempt) and note_callback(known) is known
    if known is not None and is_known and (manifest := _manifest_of(context, known)):
        return _succeeded(context, known, store.spec(run), manifest)
    record = store.update(run, note_callback)
    if record.execution != execution or record.state.is_terminal or record.attempt != attempt:
        return superseded(record)
    spec = store.spec(run)
    if record.cancel_requested:
        status = _status(context, record, spec)
        _note_waiting(context, record, status, started=False)
        return failed(ErrorClass.CANCELLED, _cancelled(record, status))
    asked = context.now()
    try:
        manifest, status, heard, verdict = _look(context, record, spec, is_missing=is_known)
    except DropforgeError as error:
        return failed(ErrorClass.CODE, str(error), "the training image and the functions are of different versions")
    if manifest is not None:
        return _succeeded(context, record, spec, manifest)
    if verdict.error is not None:
        _note_waiting(context, record, status, started=verdict.started)
        return _failed(context, run, attempt, spec, verdict.error, verdict.started)
    if verdict.started:
        record = _tell_training(context, _note_training(context, record, attempt), attempt, spec, is_over=False)
    else:
        record = _note_running(context, record, status, asked)
    return _continue(context, record, attempt, spec, status, heard, verdict)


def _is_waiting(record: Record, execution: str, attempt: int) -> bool:
    """Whether an execution waits for an attempt that nothing has ended."""
    is_open = not record.state.is_terminal and record.cancel_requested is None
    return is_open and record.execution == execution and record.attempt == attempt


def _manifest_of(context: Context, record: Record) -> Manifest | None:
    """The manifest of a run whose record may be old: it needs no present record, because a conditional write follows.

    None also for a manifest that needs the present record: one that nobody can read, and one of a machine that serves.
    """
    spec = context.store.spec(record.run)
    if spec.serve is not None and spec.serve.keeps_machine:
        return None
    storage, bucket = context.cloud.clients.storage(), context.settings.runs_bucket
    try:
        return read_manifest(storage, bucket, record.run, context.store.key(record.run))
    except DropforgeError:
        return None


def _look(
    context: Context, record: Record, spec: JobSpec, *, is_missing: bool
) -> tuple[Manifest | None, Status | None, Heard, Verdict]:
    """The manifest, the status in the cloud, the events, and the verdict. Raises DropforgeError for unreadable data.

    `is_missing`: there was no manifest a moment ago.
    """
    storage, bucket, key = context.cloud.clients.storage(), context.settings.runs_bucket, context.store.key(record.run)
    manifest = None if is_missing else read_manifest(storage, bucket, record.run, key)
    if manifest is not None:  # it decides alone
        return manifest, None, Heard(), Verdict()
    status = _status(context, record, spec)
    heard = hear(context.store, record.run, record.attempt)
    verdict = decide(heard, status, record, context.now(), context.settings)
    if verdict.error is not None:  # the container may have committed the model since the first read
        manifest = read_manifest(storage, bucket, record.run, key)
    return manifest, status, heard, verdict


def _continue(
    context: Context,
    record: Record,
    attempt: int,
    spec: JobSpec,
    status: Status | None,
    heard: Heard,
    verdict: Verdict,
) -> Waiting | Failed | Superseded:
    """The answer for an attempt that has not ended: warn people, and end the attempt if it is stuck."""
    looked = context.now()
    for notice in due(record, spec, looked):
        record = warn(context, record, spec, notice)
    if status is not None and status.wait_reason:
        record = warn_of_wait(context, record, spec)
    if record.attempt != attempt:  # this call was slow: what it saw of its attempt says nothing about the next attempt
        return superseded(record)
    if stuck := _stuck(context, record, spec, status, heard):
        record = warn(context, record, spec, _stuck_notice(stuck, record, spec, looked))
        if spec.limits.on_stuck != "notify":
            return _failed(context, record.run, attempt, spec, stuck, verdict.started)
    wait = min(verdict.look_again, _patience(context, record, spec, looked))
    if status is not None and (status.phase is Phase.PENDING or status.starting) and not verdict.started:
        wait = min(wait, next_reason((looked - record.attempts[-1].started).total_seconds()))
    deadline = record.attempts[-1].deadline.timestamp()
    return Waiting(wait_seconds=wait, deadline=deadline)


def _stuck(context: Context, record: Record, spec: JobSpec, status: Status | None, heard: Heard) -> RunError | None:
    """The error of a running attempt that is stuck (run/standstill.py).

    Reports alone are no proof of progress: a container may report the same step again and again. Checkpoints are
    events. At most two of them are read.
    """
    attempt, now = record.attempts[-1], context.now()
    # Not `attempt.running`: some machines may have waited for the others.
    starts = [attempt.seen, *(report.received for report in heard.reports)]
    stands = standstill(heard.series, starts, spec.limits, now)
    if status is None or status.phase is not Phase.RUNNING or stands is None or not stands.is_stuck:
        return None
    since = now - timedelta(seconds=stands.limit_seconds)
    before = _step(context.store, record.run, [name for name, received in heard.progress if received <= since])
    later = _step(context.store, record.run, [name for name, received in heard.progress if received > since])
    if later is not None and (before is None or later > before):
        return None
    if heard.series is None and before is not None:
        stands = stands._replace(seconds=stands.limit_seconds, step=before)
    message = f"attempt {attempt.number} is stuck: {stands.text}. The cloud reports that it runs"
    hint = f"read its log (`dropforge logs {record.run}`); if it is only slow, raise limits.stuck_after"
    return RunError(error_class=ErrorClass.STUCK, message=message, hint=hint)


def _stuck_notice(stuck: RunError, record: Record, spec: JobSpec, now: datetime) -> Notice:
    """The notice about a stuck attempt: the fault, and the effect of `limits.on_stuck`."""
    ended = record.with_end(record.attempt, stuck, now)
    if spec.limits.on_stuck == "notify":
        follows = "It continues, because limits.on_stuck is 'notify'"
    elif retry_or_fail(ended, spec, stuck, now).retry:
        follows = "Another attempt resumes from the last checkpoint"
    else:
        follows = "The run ends; its checkpoints are kept"
    return notices.stuck(record.attempt, stuck.message, follows)


def _step(store: RunStore, run: str, progress: list[str]) -> int | None:
    """The optimiser step in the last of these events; None without events, or if the last is malformed."""
    events = read_job_events(store.read(progress[-1]).data, run) if progress else []
    return next((event.step for event in events if isinstance(event, Checkpointed)), None)


def _failed(
    context: Context, run: str, attempt: int, spec: JobSpec, error: RunError, started: bool
) -> Failed | Superseded:
    context.log(error.message, stage="await", run=run, severity="WARNING", error_class=error.error_class)

    def change(latest: Record) -> Record:
        began = _in_training(latest, attempt, context.now()) if started else latest
        return began.with_end(attempt, error, context.now())

    record = context.store.update(run, change)
    _tell_training(context, record, attempt, spec, is_over=True)
    if record.attempt != attempt:
        return superseded(record)
    return retry_or_fail(record, spec, error, context.now())


def _in_training(record: Record, attempt: int, now: datetime) -> Record:
    """The record after `attempt` has begun to train; unchanged if the run has another attempt by now."""
    if record.state is not RunState.PROVISIONING or record.attempt != attempt:
        return record
    began = record.with_running(attempt, running_since(record.attempts[-1])).with_wait_reason(attempt, "")
    began = began.entered(RunState.TRAINING, now)
    return began.with_ledger(lambda ledger: ledger.with_created(attempt, now))


def _note_training(context: Context, record: Record, attempt: int) -> Record:
    if record.state is not RunState.PROVISIONING:
        return record
    return context.store.update(record.run, lambda latest: _in_training(latest, attempt, context.now()))


def _tell_training(context: Context, record: Record, attempt: int, spec: JobSpec, *, is_over: bool) -> Record:
    """Tell everybody once that an attempt trains; the record notes it, unless the attempt is over.

    After a crash between telling and noting, it is told again with the same event id.
    """
    key = f"training-a{attempt}"
    if record.state is not RunState.TRAINING or record.attempt != attempt or key in record.notices:
        return record
    tell(context, record, spec)
    return record if is_over else context.store.update(record.run, lambda latest: latest.with_notice(key))


def _note_running(context: Context, record: Record, status: Status | None, asked: datetime) -> Record:
    """Note the earliest start of a machine that runs, or that none ran when the function asked the cloud."""
    attempt, now = record.attempts[-1], context.now()
    if status is None:
        return record
    if status.phase is Phase.PENDING and not status.is_paid:
        return note_wait(context, record, status.wait_reason, asked)
    runs = status.phase is Phase.RUNNING

    def change(latest: Record) -> Record:
        noted = latest.with_wait_reason(attempt.number, status.wait_reason)
        if (runs and not attempt.seen) or (status.is_paid and not attempt.running):
            noted = noted.with_running(attempt.number, running_since(attempt))
        return noted.with_seen(attempt.number, now) if runs and not attempt.seen else noted

    return record if change(record) is record else context.store.update(record.run, change)


def _cancelled(record: Record, status: Status | None) -> str:
    """What the attempt did when the cancel reached it, as far as the record and the cloud know."""
    if record.state is RunState.TRAINING:
        return "cancelled while training"
    if status is not None and status.phase is Phase.RUNNING and not status.starting:
        return "cancelled while the container was starting"
    return cancelled_while(status.wait_reason if status else record.wait_reason, "waiting for a machine")


def _note_waiting(context: Context, record: Record, status: Status | None, *, started: bool) -> None:
    """Note when an attempt that ends while it waits may have started; otherwise its cost would count from its opening.

    The attempt has cost nothing, unless some of its machines existed already and waited for the others.
    """
    attempt, now = record.attempts[-1], context.now()
    if started or attempt.running or status is None or not (status.phase is Phase.PENDING or status.is_paid):
        return
    since = running_since(attempt) if status.is_paid else now
    context.store.update(record.run, lambda latest: latest.with_running(attempt.number, since))


def _succeeded(context: Context, record: Record, spec: JobSpec, manifest: Manifest) -> Succeeded | Superseded:
    """Note the success in the record, which may be old. A run that ends with it begins its teardown in this write."""
    store, attempt, execution = context.store, record.attempt, record.execution
    gate = _gate(spec, manifest.metrics)
    outcome = _outcome(spec, gate)
    odd = {name: value for name, value in manifest.metrics.items() if value is not None and not math.isfinite(value)}
    metrics: dict[str, float | None] = {**manifest.metrics, **dict.fromkeys(odd)}  # JSON has neither NaN nor infinities

    def is_current(latest: Record) -> bool:
        return latest.execution == execution and latest.attempt == attempt and not latest.state.is_terminal

    def change(latest: Record) -> Record:
        if not is_current(latest):
            return latest
        trained = _in_training(latest, attempt, context.now()).with_end(attempt, None, context.now())
        return _in_teardown(evolve(trained, metrics=metrics), outcome, context.now())

    if spec.serve is not None and spec.serve.keeps_machine:  # before the workflow tears down the attempt
        launch = launch_of(record, spec, context.settings, key=NO_KEY)
        resources = context.platforms.target(spec.target.type).resources(launch)
        store.keep(record.run, [resource.name for resource in resources])
    record = store.update(record.run, change)
    if not is_current(record):
        return superseded(record)
    _tell_training(context, _before_teardown(record), attempt, spec, is_over=True)
    for notice in (
        notices.truncated(metrics, spec.training.max_length),
        notices.beyond(metrics),
        notices.unused(manifest.unused_fields),
        notices.dated(manifest.template_date),
        notices.not_finite(odd),
    ):
        if notice is not None:
            record = warn(context, record, spec, notice)
    return Succeeded(serve=spec.serve is not None, gate=gate)


def _outcome(spec: JobSpec, gate: Gate) -> Outcome | None:
    """The outcome of a run that ends with the success of its attempt; None if its endpoint follows."""
    if not gate.passed:
        return Outcome(state=RunState.FAILED, error=gate.error)
    return None if spec.serve else Outcome(state=RunState.SUCCEEDED)


def _in_teardown(record: Record, outcome: Outcome | None, now: datetime) -> Record:
    """The record of a run that ends with its training in teardown, as `teardown` would write it.

    A cancel leaves that to `teardown`.
    """
    if outcome is None or record.cancel_requested or record.state is not RunState.TRAINING:
        return record
    return evolve(record, outcome=record.outcome or outcome).entered(RunState.TEARING_DOWN, now)


def _before_teardown(record: Record) -> Record:
    """The record of a run in teardown as it was when it trained, for the message of that."""
    is_after = record.state is RunState.TEARING_DOWN
    return evolve(record, state=RunState.TRAINING) if is_after else record


def _gate(spec: JobSpec, metrics: dict[str, float | None]) -> Gate:
    """Whether the model is good enough to be served, and the error if it is not."""
    gate = spec.evaluation.gate if spec.evaluation else None
    if gate is None:
        return Gate(passed=True)
    value = metrics.get(gate.metric)
    if gate.passes(value):
        return Gate(passed=True, metric=gate.metric, value=value)
    bound = f">= {gate.min}" if gate.min is not None else f"<= {gate.max}"
    message = f"{gate.metric} is {value}; the gate asks for {bound}"
    hint = "the artifacts are kept; train longer, on more data, or lower the gate"
    return Gate(passed=False, error=RunError(error_class=ErrorClass.GATE, message=message, hint=hint))


def _status(context: Context, record: Record, spec: JobSpec) -> Status | None:
    """The attempt's status in the cloud; None if the cloud does not answer."""
    target = context.platforms.target(spec.target.type)
    try:
        launch = launch_of(record, spec, context.settings, key=context.store.key(record.run))
        return target.inspect(context.cloud, launch)
    except CloudError as error:
        context.log(error.message, stage="await", run=record.run, severity="WARNING", error_class=error.error_class)
        return None


def _with_callback(record: Record, execution: str, attempt: int, callback_url: str) -> Record:
    if record.attempt != attempt:
        return record
    return record.with_callback(execution, callback_url)


def _patience(context: Context, record: Record, spec: JobSpec, looked: datetime) -> float:
    """Seconds until the next look without a callback: the check interval, or less if a limit or a warning is due.

    looked: when `inspect` looked for due warnings. A warning that became due since then was not sent yet.
    """
    now, attempt = context.now(), record.attempts[-1]
    left = (attempt.deadline - now).total_seconds()
    warning = seconds_to_warning(record, spec, looked) - (now - looked).total_seconds()
    interval = float(context.settings.check_interval_seconds)
    return max(1.0, min(interval, left + 1, warning + 1))
