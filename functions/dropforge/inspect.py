"""Stage `await`: what has become of an attempt. Two paths lead here, the job event's callback and the wait's time-out;
either alone is enough, because both end in one look at the bucket and one at the cloud."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from . import names
from .artifacts import Manifest, read_manifest
from .clients import storage
from .errors import CloudError, DropforgeError, ErrorClass
from .events import Failed, JobEvent, Preempted, Started, Succeeded, parse_job_event
from .log import log
from .outcome import failed, retry_or_fail, superseded, waiting
from .provision import launch_of
from .runs import Attempt, Record, RunError, RunStore, open_store, utc_now
from .settings import Settings, settings
from .spec import JobSpec
from .targets import get_target
from .targets.base import Phase, Status

REPORT_SECONDS = 3.0  # how long a container's last event may take after the cloud has seen its end
_SEE_LOG = "see the container's log"
# What decides is rare; progress is not. Reading the newest few events of these kinds is enough.
DECISIVE = ("started", "succeeded", "failed", "preempted")


@dataclass(frozen=True)
class Verdict:
    """What is known of an attempt: still waiting, succeeded, or failed with an error."""

    succeeded: bool = False
    started: bool = False
    error: RunError | None = None


def inspect(run: str, execution: str, attempt: int, callback_url: str) -> dict[str, Any]:
    """Look at an attempt, after noting where to call back. Raises NotFound for an unknown run.

    Answers {"status": "WAITING" | "SUCCEEDED" | "FAILED" | "CANCELLED" | "SUPERSEDED", "started": bool, ...}.
    """
    store = open_store()
    record = store.update(run, lambda found: _with_callback(found, execution, callback_url))
    if record.execution != execution or record.state.is_terminal or record.attempt != attempt:
        return superseded(record)
    if record.cancel_requested:
        return failed(ErrorClass.CANCELLED, "cancelled while training")
    spec = store.spec(run)
    try:
        manifest = read_manifest(storage(), settings().runs_bucket, run)
        cloud = _cloud(record, spec, manifest)
        verdict = decide(read_events(store, run, attempt), manifest, cloud, record, utc_now(), settings())
        if verdict.error is not None:  # the model may have been committed since the bucket was looked at
            manifest = read_manifest(storage(), settings().runs_bucket, run)
    except DropforgeError as error:
        return failed(ErrorClass.CODE, str(error), "the training image and the functions are of different versions")
    if manifest is not None:
        return _succeeded(store, record, spec, manifest)
    if verdict.error is not None:
        log(verdict.error.message, stage="await", run=run, severity="WARNING", error_class=verdict.error.error_class)
        record = store.update(run, lambda found: found.with_end(attempt, verdict.error, utc_now()))
        return {**retry_or_fail(record, spec, verdict.error), "started": verdict.started}
    ended = cloud is not None and cloud.phase is Phase.FAILED
    patience = REPORT_SECONDS if ended else _patience(record.attempts[-1])
    return {**waiting("WAITING", patience), "started": verdict.started}


def read_events(store: RunStore, run: str, attempt: int) -> list[JobEvent]:
    """The decisive job events of an attempt, in order."""
    prefix = names.events_prefix(run, attempt)
    wanted = [name for name in store.names(prefix) if name.removesuffix(".json").rsplit("-", 1)[1] in DECISIVE]
    return [parse_job_event(store.read(name).data) for name in wanted]


def decide(
    events: list[JobEvent],
    manifest: Manifest | None,
    cloud: Status | None,
    record: Record,
    now: datetime,
    settings: Settings,
) -> Verdict:
    """The verdict on an attempt, from what it reported, what it left in the bucket and what the cloud says.

    The manifest is written last and alone proves success. `cloud` is None when it could not be asked.
    """
    started = any(isinstance(event, Started) for event in events)
    if manifest is not None:
        return Verdict(succeeded=True, started=started)
    ended = next((e for e in reversed(events) if isinstance(e, Failed | Preempted | Succeeded)), None)
    error = _reported(ended, record.attempts[-1], now) or _seen(cloud, ended, record, now, settings)
    return Verdict(started=started, error=error)


def _reported(event: JobEvent | None, attempt: Attempt, now: datetime) -> RunError | None:
    """What the container itself said of its end."""
    if isinstance(event, Failed):
        return RunError(error_class=event.error_class, message=event.message, hint=event.hint)
    if isinstance(event, Preempted):
        if now >= attempt.deadline:
            return _deadline(attempt)
        message = f"the machine was taken away at step {event.step}"
        return RunError(
            error_class=ErrorClass.PREEMPTED, message=message, hint="training resumes from its last checkpoint"
        )
    return None


def _seen(
    cloud: Status | None, ended: JobEvent | None, record: Record, now: datetime, settings: Settings
) -> RunError | None:
    """What the cloud says of an attempt that has not itself reported its end."""
    attempt = record.attempts[-1]
    if cloud is None:
        return _deadline(attempt) if now >= attempt.deadline else None
    if cloud.phase is Phase.SUCCEEDED:
        message = "the container ended with exit code 0 but left no manifest" + (
            " (it reported success)" if ended else ""
        )
        return RunError(error_class=ErrorClass.CODE, message=message, hint=_SEE_LOG)
    if now >= attempt.deadline:
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
    waited = (now - attempt.started).total_seconds()
    if cloud.phase is Phase.PENDING and waited > (attempt.max_wait_seconds or settings.provision_deadline_seconds):
        found = cloud.error_class or ErrorClass.STOCKOUT
        what = "no capacity" if found.moves_on else "not running"
        message = f"{what} in {attempt.region} after {waited:.0f} s" + (f": {cloud.message}" * bool(cloud.message))
        return RunError(error_class=found, message=message, hint=cloud.hint or "add placements in other regions")
    return None


def _may_report(cloud: Status, now: datetime) -> bool:
    """Whether the container's own account of its end, which says more than an exit code, may still be under way."""
    return cloud.ended is not None and (now - cloud.ended).total_seconds() < REPORT_SECONDS


def _succeeded(store: RunStore, record: Record, spec: JobSpec, manifest: Manifest) -> dict[str, Any]:
    metrics = dict(manifest.metrics)

    def change(found: Record) -> Record:
        return found.with_end(record.attempt, None, utc_now()).model_copy(update={"metrics": metrics})

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


def _with_callback(record: Record, execution: str, callback_url: str) -> Record:
    if record.execution != execution or record.callback_url == callback_url or record.state.is_terminal:
        return record
    return record.model_copy(update={"callback_url": callback_url})


def _patience(attempt: Attempt) -> float:
    """Seconds until the next look when nobody calls back: the check interval, but not past the deadline."""
    left = (attempt.deadline - utc_now()).total_seconds()
    return max(1.0, min(float(settings().check_interval_seconds), left + 1))


def _deadline(attempt: Attempt) -> RunError:
    allowed = (attempt.deadline - attempt.started).total_seconds()
    message = f"attempt {attempt.number} ran out of time after {allowed:.0f} s"
    hint = "raise limits.max_duration or limits.max_cost_usd, or train less; checkpoints are kept"
    return RunError(error_class=ErrorClass.DEADLINE, message=message, hint=hint)
