"""Stage `await`: what has become of an attempt. Two paths lead here, the job event's callback and the wait's time-out;
either alone is enough, because both end in one look at the bucket and one at the cloud."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from dropforge.base import names
from dropforge.base.errors import CloudError, DropforgeError, ErrorClass
from dropforge.base.log import log
from dropforge.base.settings import Settings, settings
from dropforge.cloud.clients import storage
from dropforge.money import Notice, due, running_since, seconds_to_warning
from dropforge.platforms import get_target
from dropforge.platforms.training import Phase, Status
from dropforge.run.artifacts import Manifest, read_manifest
from dropforge.run.events import (
    Checkpointed,
    Failed,
    JobEvent,
    Preempted,
    Progress,
    Started,
    Succeeded,
    parse_job_event,
)
from dropforge.run.record import Attempt, Record, RunError, utc_now
from dropforge.run.store import RunStore, open_store
from dropforge.spec import JobSpec, seconds
from dropforge.stages.answers import failed, retry_or_fail, superseded, waiting
from dropforge.stages.notify import warn
from dropforge.stages.provision import launch_of

REPORT_SECONDS = 3.0  # how long a container's last event may take after the cloud has seen its end
BELIEVE_SECONDS = 60.0  # how long a container that has reported its end may still be running, by the cloud
AGREE_SECONDS = 1.0  # between looks meanwhile, at first; REPORT_SECONDS later
REORDER_SECONDS = 5.0  # events that were published in another order come within this
_SEE_LOG = "see the container's log"
# What decides is rare; progress is not. Reading the newest few events of these kinds is enough.
DECISIVE = ("started", "succeeded", "failed", "preempted")
PROGRESS = ("progress", "checkpoint")


class Report(NamedTuple):
    """A decisive job event, and when it was received: what it says itself of its time is not to be relied on."""

    event: JobEvent
    received: datetime


@dataclass(frozen=True)
class Heard:
    """What was received of an attempt: decisive events by their sequence, and the names and times of its progress."""

    reports: list[Report] = field(default_factory=list)
    progress: list[tuple[str, datetime]] = field(default_factory=list)

    @property
    def started(self) -> bool:
        return any(isinstance(report.event, Started) for report in self.reports)

    @property
    def last(self) -> datetime | None:
        """When anything was received last."""
        times = [*(report.received for report in self.reports), *(received for _, received in self.progress)]
        return max(times, default=None)

    @property
    def end(self) -> Report | None:
        """The last report of an end, unless training went on after it: then it was forged, or the machine restarted."""
        reports = [report for report in self.reports if isinstance(report.event, Failed | Preempted)]
        last = max((received for _, received in self.progress), default=None)
        late = timedelta(seconds=REORDER_SECONDS)
        return next((r for r in reversed(reports) if last is None or last <= r.received + late), None)


@dataclass(frozen=True)
class Verdict:
    """What is known of an attempt: still waiting, then at most until the next look, succeeded, or failed."""

    succeeded: bool = False
    started: bool = False
    error: RunError | None = None
    look_again: float = math.inf  # seconds


def inspect(run: str, execution: str, attempt: int, callback_url: str) -> dict[str, Any]:
    """Look at an attempt, after noting where to call back. Raises NotFound for an unknown run.

    Answers {"status": "WAITING" | "SUCCEEDED" | "FAILED" | "CANCELLED" | "SUPERSEDED", "started": bool, ...}.
    """
    store = open_store()
    record = store.update(run, lambda found: _with_callback(found, execution, attempt, callback_url))
    if record.execution != execution or record.state.is_terminal or record.attempt != attempt:
        return superseded(record)
    spec = store.spec(run)
    if record.cancel_requested:
        _note_waiting(store, record, _cloud(record, spec, None), started=False)
        return failed(ErrorClass.CANCELLED, "cancelled while training")
    try:
        manifest = read_manifest(storage(), settings().runs_bucket, run)
        cloud = _cloud(record, spec, manifest)
        heard = hear(store, run, attempt)
        verdict = decide(heard, manifest, cloud, record, utc_now(), settings())
        if verdict.error is not None:  # the model may have been committed since the bucket was looked at
            manifest = read_manifest(storage(), settings().runs_bucket, run)
    except DropforgeError as error:
        return failed(ErrorClass.CODE, str(error), "the training image and the functions are of different versions")
    if manifest is not None:
        return _succeeded(store, record, spec, manifest)
    if verdict.error is not None:
        record = _note_waiting(store, record, cloud, started=verdict.started)
        return _failed(store, record, spec, verdict.error, verdict.started)
    record = _note_running(store, record, cloud, verdict)
    for notice in due(record, spec, utc_now()):
        record = warn(store, record, spec, notice)
    if stuck := _stuck(store, record, spec, cloud, heard):
        record = warn(store, record, spec, Notice(f"stuck-a{attempt}", "is stuck", stuck.message))
        if spec.limits.on_stuck != "notify":
            return _failed(store, record, spec, stuck, verdict.started)
    answer = {**waiting("WAITING", min(verdict.look_again, _patience(record, spec))), "started": verdict.started}
    return {**answer, "deadline": record.attempts[-1].deadline.timestamp()}


def hear(store: RunStore, run: str, attempt: int) -> Heard:
    """What was received of an attempt, from one listing; only what decides is read."""
    reports, progress = [], []
    for name, received in store.written(names.events_prefix(run, attempt)):
        kind = name.removesuffix(".json").rsplit("-", 1)[1]
        if kind in DECISIVE:
            reports.append(Report(parse_job_event(store.read(name).data), received))
        elif kind in PROGRESS:
            progress.append((name, received))
    return Heard(reports, progress)


def decide(
    heard: Heard, manifest: Manifest | None, cloud: Status | None, record: Record, now: datetime, settings: Settings
) -> Verdict:
    """The verdict on an attempt, from what it reported, what it left in the bucket and what the cloud says.

    The manifest is written last and alone proves success. A failure that was reported is believed once the cloud, too,
    says that the container has ended, or when it says for long that it runs, though nothing more is heard of it.
    `cloud` is None when it could not be asked.
    """
    if manifest is not None:
        return Verdict(succeeded=True, started=heard.started)
    attempt, report = record.attempts[-1], heard.end
    if report is not None and now < attempt.deadline and (wait := _until_believed(report, cloud, now)):
        return Verdict(started=heard.started, look_again=wait)
    error = (_reported(report.event, attempt, now) if report else None) or _seen(cloud, heard, record, now, settings)
    ended = cloud is not None and cloud.phase is Phase.FAILED and error is None
    return Verdict(started=heard.started, error=error, look_again=REPORT_SECONDS if ended else math.inf)


def _until_believed(report: Report, cloud: Status | None, now: datetime) -> float:
    """Seconds until the next look at an attempt that has reported its end; 0: that is believed.

    Anybody who may publish job events can forge one; a container that has really failed ends at once.
    """
    if cloud is None:
        return math.inf  # never before the cloud has been asked
    since = (now - report.received).total_seconds()
    if cloud.phase not in (Phase.PENDING, Phase.RUNNING) or since >= BELIEVE_SECONDS:
        return 0.0
    return AGREE_SECONDS if since < 10 * AGREE_SECONDS else REPORT_SECONDS


def _reported(event: JobEvent, attempt: Attempt, now: datetime) -> RunError | None:
    """What the container itself said of its end."""
    if isinstance(event, Failed):
        if event.error_class is ErrorClass.DEADLINE:
            return _deadline(attempt, event.message)
        return RunError(error_class=event.error_class, message=event.message, hint=event.hint)
    if isinstance(event, Preempted):
        if now >= attempt.deadline:
            return _deadline(attempt)
        message = f"the machine was taken away at step {event.step}"
        return RunError(
            error_class=ErrorClass.PREEMPTED, message=message, hint="training resumes from its last checkpoint"
        )
    return None


def _seen(cloud: Status | None, heard: Heard, record: Record, now: datetime, settings: Settings) -> RunError | None:
    """What the cloud says of an attempt that has not itself reported its end."""
    attempt = record.attempts[-1]
    if cloud is None:
        return _deadline(attempt) if now >= attempt.deadline else None
    if cloud.phase is Phase.SUCCEEDED:
        claimed = any(isinstance(report.event, Succeeded) for report in heard.reports)
        message = "the container ended with exit code 0 but left no manifest" + (" (it reported success)" * claimed)
        return RunError(error_class=ErrorClass.CODE, message=message, hint=_SEE_LOG)
    # What the budget pays for begins when the machine runs; an attempt that has only waited has spent nothing of it.
    has_spent = cloud.phase is not Phase.PENDING or attempt.running is not None or heard.started
    is_late = now >= attempt.deadline
    if is_late and (has_spent or attempt.limit == "max_duration"):
        return _deadline(attempt)
    if cloud.phase is Phase.FAILED and cloud.error_class is ErrorClass.DEADLINE:
        return _deadline(attempt)
    if cloud.phase is Phase.FAILED and _may_report(cloud, now):
        return None
    if cloud.phase is Phase.FAILED:
        exit_code = "" if cloud.exit_code is None else f" (exit code {cloud.exit_code})"
        found = cloud.error_class or ErrorClass.INFRASTRUCTURE
        return RunError(error_class=found, message=f"{cloud.message}{exit_code}", hint=cloud.hint or _SEE_LOG)
    if cloud.phase is Phase.GONE:
        message = f"{cloud.message}: it was deleted from outside"
        return RunError(error_class=ErrorClass.INFRASTRUCTURE, message=message, hint="training starts again")
    # One that has trained waits anew: for a host in place of one that was lost, or for the cloud to note its end.
    launched = attempt.launched or attempt.started
    waited = (now - max(launched, heard.last or launched)).total_seconds()
    patience = attempt.max_wait_seconds or settings.provision_deadline_seconds
    if cloud.phase is Phase.PENDING and (is_late or waited > patience):
        found = cloud.error_class or ErrorClass.STOCKOUT
        what = "no capacity" if found.moves_on else "not running"
        message = f"{what} in {attempt.region} after {waited:.0f} s" + (f": {cloud.message}" * bool(cloud.message))
        return RunError(error_class=found, message=message, hint=cloud.hint or "add placements in other regions")
    return None


def _may_report(cloud: Status, now: datetime) -> bool:
    """Whether the container's own account of its end, which says more than an exit code, may still be under way."""
    return cloud.ended is not None and (now - cloud.ended).total_seconds() < REPORT_SECONDS


def _stuck(store: RunStore, record: Record, spec: JobSpec, cloud: Status | None, heard: Heard) -> RunError | None:
    """An attempt that the cloud says is running and whose training has not advanced for limits.stuck_after.

    Events alone show nothing: a container may go on telling the same step. Two of them are read at most.
    """
    attempt, now = record.attempts[-1], utc_now()
    after = timedelta(seconds=seconds(spec.limits.stuck_after))
    # Not since when it may run: some of its machines may have waited for others.
    began = min((report.received for report in heard.reports), default=attempt.seen)
    if cloud is None or cloud.phase is not Phase.RUNNING or began is None or now - began < after:
        return None
    since = now - after
    if any(report.received > since for report in heard.reports):
        return None  # it began anew on a machine that was restarted
    earlier = [name for name, received in heard.progress if received <= since]
    later = [name for name, received in heard.progress if received > since]
    step = _step(store, later or earlier)
    if later and (not earlier or step > _step(store, earlier)):
        return None
    message = (
        f"attempt {attempt.number} has made no progress for {spec.limits.stuck_after}: it is at step {step}, "
        f"and the cloud says that it runs"
    )
    hint = "see the container's log; if it is only slow, raise limits.stuck_after"
    return RunError(error_class=ErrorClass.STUCK, message=message, hint=hint)


def _step(store: RunStore, progress: list[str]) -> int:
    """The optimiser step that the last of these events tells; 0 when there is none."""
    event = parse_job_event(store.read(progress[-1]).data) if progress else None
    return event.step if isinstance(event, Progress | Checkpointed) else 0


def _failed(store: RunStore, record: Record, spec: JobSpec, error: RunError, started: bool) -> dict[str, Any]:
    log(error.message, stage="await", run=record.run, severity="WARNING", error_class=error.error_class)
    record = store.update(record.run, lambda found: found.with_end(record.attempt, error, utc_now()))
    return {**retry_or_fail(record, spec, error), "started": started}


def _note_running(store: RunStore, record: Record, cloud: Status | None, verdict: Verdict) -> Record:
    """Note since when the machine runs, at the earliest; stage notify does, when the container has said so."""
    attempt, now = record.attempts[-1], utc_now()
    runs, is_paid = cloud is not None and cloud.phase is Phase.RUNNING, cloud is not None and cloud.is_paid
    if verdict.started or not ((runs and not attempt.seen) or (is_paid and not attempt.running)):
        return record

    def change(found: Record) -> Record:
        noted = found.with_running(attempt.number, running_since(attempt, now, settings()))
        return noted.with_seen(attempt.number, now) if runs else noted

    return store.update(record.run, change)


def _note_waiting(store: RunStore, record: Record, cloud: Status | None, *, started: bool) -> Record:
    """Note of an attempt that ends while it waits since when it may have run: it would count from its start.

    It has cost nothing, unless some of its machines were there already, and waited for the others.
    """
    attempt, now = record.attempts[-1], utc_now()
    if started or attempt.running or cloud is None or not (cloud.phase is Phase.PENDING or cloud.is_paid):
        return record
    since = running_since(attempt, now, settings()) if cloud.is_paid else now
    return store.update(record.run, lambda found: found.with_running(attempt.number, since))


def _succeeded(store: RunStore, record: Record, spec: JobSpec, manifest: Manifest) -> dict[str, Any]:
    metrics = dict(manifest.metrics)

    def change(found: Record) -> Record:
        return found.with_end(record.attempt, None, utc_now()).model_copy(update={"metrics": metrics})

    if spec.serve is not None and spec.serve.keeps_machine:  # before its attempt is torn down
        for resource in get_target(spec.target.type).resources(launch_of(record, spec)):
            store.keep(record.run, resource.name)
    store.update(record.run, change)
    return {"status": "SUCCEEDED", "started": True, "serve": spec.serve is not None, "gate": _gate(spec, metrics)}


def _gate(spec: JobSpec, metrics: dict[str, float | None]) -> dict[str, Any]:
    """Whether the model is good enough to be served, and the error if it is not."""
    gate = spec.evaluation.gate if spec.evaluation else None
    if gate is None:
        return {"passed": True}
    value = metrics.get(gate.metric)
    bound = f">= {gate.min}" if gate.min is not None else f"<= {gate.max}"
    message = f"{gate.metric} is {value}; the gate asks for {bound}"
    hint = "the artifacts are kept; train longer, on more data, or lower the gate"
    if gate.passes(value):
        return {"passed": True, "metric": gate.metric, "value": value}
    return {"passed": False, **failed(ErrorClass.GATE, message, hint)}


def _cloud(record: Record, spec: JobSpec, manifest: Manifest | None) -> Status | None:
    """One look at the cloud; None when it cannot be had now. A committed manifest makes it unnecessary."""
    if manifest is not None:
        return None
    try:
        return get_target(spec.target.type).inspect(launch_of(record, spec))
    except CloudError as error:
        log(error.message, stage="await", run=record.run, severity="WARNING", error_class=error.error_class)
        return None


def _with_callback(record: Record, execution: str, attempt: int, callback_url: str) -> Record:
    if record.execution != execution or record.state.is_terminal or record.attempt != attempt:
        return record
    if record.callback_url == callback_url and record.attempts[-1].launched:
        return record
    return record.with_launch(attempt, utc_now()).model_copy(update={"callback_url": callback_url})


def _patience(record: Record, spec: JobSpec) -> float:
    """Seconds until the next look when nobody calls back: the check interval, or less when something is due before."""
    now, attempt = utc_now(), record.attempts[-1]
    left = (attempt.deadline - now).total_seconds()
    return max(1.0, min(float(settings().check_interval_seconds), left + 1, seconds_to_warning(record, spec, now) + 1))


def _deadline(attempt: Attempt, detail: str = "") -> RunError:
    """The end of an attempt at its deadline, by the limit that set it."""
    allowed = (attempt.deadline - attempt.started).total_seconds()
    found = ErrorClass.BUDGET if attempt.limit == "max_cost_usd" else ErrorClass.DEADLINE
    why = "which is what the budget paid for" if found is ErrorClass.BUDGET else "which is what max_duration left"
    message = f"attempt {attempt.number} was stopped after {allowed:.0f} s, {why}" + f"; {detail}" * bool(detail)
    hint = f"raise limits.{attempt.limit}, or train less; checkpoints are kept"
    return RunError(error_class=found, message=message, hint=hint)
