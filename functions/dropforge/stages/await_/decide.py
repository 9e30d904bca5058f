"""The verdict on an attempt, from job events, the bucket and the cloud. Pure: `inspect` collects the facts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.base.settings import Settings
from dropforge.platforms.training import Phase, Status
from dropforge.run.events import Failed, JobEvent, Preempted, Started, Succeeded, read_job_events
from dropforge.run.record import Attempt, Record, RunError
from dropforge.run.series import Kept
from dropforge.run.store import RunStore

REPORT_SECONDS = 3.0  # how long a container's last event may take after the cloud has seen the container's end
BELIEVE_SECONDS = 60.0  # how long a container that reported its end may still run, according to the cloud
AGREE_SECONDS = 1.0  # between the first looks until the cloud agrees; REPORT_SECONDS between later looks
REORDER_SECONDS = 5.0  # events that were published in another order arrive within this time
SEE_LOG = "see the container's log"
# Decisive events are rare, checkpoints are frequent: `inspect` reads all of the former and a few of the latter.
DECISIVE = ("started", "succeeded", "failed", "preempted")
MOST_REPORTS = 50  # the first and the last that are read: a container may publish as many as it likes


class Report(NamedTuple):
    """A decisive job event, and when the bucket received it: the event's own time is not reliable."""

    event: JobEvent
    received: datetime


@dataclass(frozen=True)
class Heard:
    """The reports of an attempt: decisive events by sequence, names and times of those of checkpoints, its series."""

    reports: list[Report] = field(default_factory=list)
    progress: list[tuple[str, datetime]] = field(default_factory=list)
    series: Kept | None = None

    @property
    def started(self) -> bool:
        return self.series is not None or any(isinstance(report.event, Started) for report in self.reports)

    @property
    def last(self) -> datetime | None:
        """When the bucket received the last event or the series; None without any."""
        times = [*(report.received for report in self.reports), *(received for _, received in self.progress)]
        return max([*times, *([self.series.received] if self.series else [])], default=None)

    @property
    def end(self) -> Report | None:
        """The last report of an end. None if training continued after it: a forged report, or a restarted machine.

        The trainer may write its series late. So the time of a point is compared with the time in the report: both are
        by the trainer's clock.
        """
        reports = [report for report in self.reports if isinstance(report.event, Failed | Preempted)]
        last = max((received for _, received in self.progress), default=None)
        point = self.series.series.last if self.series else None
        late = timedelta(seconds=REORDER_SECONDS)

        def is_last(report: Report) -> bool:
            is_newest = last is None or last <= report.received + late
            return is_newest and (point is None or point <= report.event.at + late)

        return next(filter(is_last, reversed(reports)), None)


@dataclass(frozen=True)
class Verdict:
    """The verdict on an attempt: failed (`error`), or not ended: then look again after `look_again`."""

    started: bool = False
    error: RunError | None = None
    look_again: float = math.inf  # seconds


def hear(store: RunStore, run: str, attempt: int) -> Heard:
    """The job events of an attempt, from one listing, and its series. A malformed event is none.

    Of the events, only decisive events are read.
    """
    decisive, progress = [], []
    for name, received in store.written(names.events_prefix(run, attempt)):
        kind = name.removesuffix(".json").rpartition("-")[2]
        if kind in DECISIVE:
            decisive.append((name, received))
        elif kind == "checkpoint":
            progress.append((name, received))
    first, last = decisive[:MOST_REPORTS], decisive[MOST_REPORTS:][-MOST_REPORTS:]
    reports = [
        Report(event, received)
        for name, received in [*first, *last]
        for event in read_job_events(store.read(name).data, run)
    ]
    return Heard(reports, progress, store.series(run, attempt, store.key(run)))


def decide(heard: Heard, status: Status | None, record: Record, now: datetime, settings: Settings) -> Verdict:
    """The verdict on an attempt without a manifest, from its events and its status in the cloud.

    The manifest is written last, and only the manifest proves success. A reported failure counts once the cloud agrees
    that the container has ended, or once the container has run for BELIEVE_SECONDS without further events. `status` is
    None if the cloud did not answer.
    """
    attempt, report = record.attempts[-1], heard.end
    if report is not None and now < attempt.deadline and (wait := _until_believed(report, status, now)):
        return Verdict(started=heard.started, look_again=wait)
    error = _reported(report.event, attempt, now) if report else None
    error = error or _seen(status, heard, record, now, settings)
    has_ended = status is not None and status.phase is Phase.FAILED and error is None
    return Verdict(started=heard.started, error=error, look_again=REPORT_SECONDS if has_ended else math.inf)


def _until_believed(report: Report, status: Status | None, now: datetime) -> float:
    """Seconds until the next look at an attempt that reported its end; 0 if the report counts now.

    Everybody who may publish job events can forge a report; a container that has really failed ends at once.
    """
    if status is None:
        return math.inf  # the report never counts before the cloud has answered
    since = (now - report.received).total_seconds()
    if status.phase not in (Phase.PENDING, Phase.RUNNING) or since >= BELIEVE_SECONDS:
        return 0.0
    return AGREE_SECONDS if since < 10 * AGREE_SECONDS else REPORT_SECONDS


def _reported(event: JobEvent, attempt: Attempt, now: datetime) -> RunError | None:
    """The error that the container itself reported."""
    if isinstance(event, Failed):
        if event.error_class is ErrorClass.DEADLINE:
            return _deadline(attempt, event.message)
        return RunError(error_class=event.error_class, message=event.message, hint=event.hint)
    if isinstance(event, Preempted):
        if now >= attempt.deadline:
            return _deadline(attempt)
        message = f"the machine was taken away at step {event.step}"
        hint = "training resumes from its last checkpoint"
        return RunError(error_class=ErrorClass.PREEMPTED, message=message, hint=hint)
    return None


def _seen(status: Status | None, heard: Heard, record: Record, now: datetime, settings: Settings) -> RunError | None:
    """The error of an attempt that did not report its end, from its status in the cloud."""
    attempt = record.attempts[-1]
    is_late = now >= attempt.deadline
    if status is None:
        return _deadline(attempt) if is_late else None
    if status.phase is Phase.SUCCEEDED:
        return _no_manifest(heard)
    # The time that the budget pays for begins when the machine runs; an attempt that only waited has spent nothing.
    has_spent = status.phase is not Phase.PENDING or attempt.running is not None or heard.started
    if is_late and (has_spent or attempt.limit == "max_duration"):
        return _deadline(
            attempt, f"it waited: {status.wait_reason}" if status.wait_reason and not heard.started else ""
        )
    if status.phase is Phase.FAILED:
        return _failed(status, attempt, now)
    if status.phase is Phase.GONE:
        message = f"{status.message}: it was deleted from outside"
        return RunError(error_class=ErrorClass.INFRASTRUCTURE, message=message, hint="training starts again")
    if status.phase is Phase.PENDING:
        return _no_capacity(status, heard, attempt, now, settings)
    return None


def _no_manifest(heard: Heard) -> RunError:
    claimed = any(isinstance(report.event, Succeeded) for report in heard.reports)
    message = "the container ended with exit code 0 but left no manifest" + (" (it reported success)" * claimed)
    hint = f"{SEE_LOG}; an image that is older than the functions cannot prove its manifest: run `make images`"
    return RunError(error_class=ErrorClass.CODE, message=message, hint=hint)


def _failed(status: Status, attempt: Attempt, now: datetime) -> RunError | None:
    """The error of a container that has ended; None while its own report may still arrive."""
    if status.error_class is ErrorClass.DEADLINE:
        return _deadline(attempt)
    # The container's own report says more than an exit code.
    if status.ended is not None and (now - status.ended).total_seconds() < REPORT_SECONDS:
        return None
    exit_code = "" if status.exit_code is None else f" (exit code {status.exit_code})"
    error_class = status.error_class or ErrorClass.INFRASTRUCTURE
    return RunError(error_class=error_class, message=f"{status.message}{exit_code}", hint=status.hint or SEE_LOG)


def _no_capacity(status: Status, heard: Heard, attempt: Attempt, now: datetime, settings: Settings) -> RunError | None:
    """The error of an attempt that has waited too long for its machines; None if it may wait on.

    An attempt that has trained waits again from its last event: for a host that replaces a lost host, or until the
    cloud notes its end.
    """
    launched = attempt.launched or attempt.started
    waited = (now - max(launched, heard.last or launched)).total_seconds()
    patience = attempt.max_wait_seconds or settings.provision_deadline_seconds
    if now < attempt.deadline and waited <= patience:
        return None
    error_class = status.error_class or ErrorClass.STOCKOUT
    problem = "no capacity" if error_class.moves_on else "not running"
    detail = f": {status.message}" * bool(status.message)
    message = f"{problem} in {attempt.region} after {waited:.0f} s{detail}"
    hint = status.hint or "add placements in other regions"
    return RunError(error_class=error_class, message=message, hint=hint)


def _deadline(attempt: Attempt, detail: str = "") -> RunError:
    """The error of an attempt at its deadline, by the limit that set the deadline."""
    allowed = (attempt.deadline - attempt.started).total_seconds()
    error_class = ErrorClass.BUDGET if attempt.limit == "max_cost_usd" else ErrorClass.DEADLINE
    limit = "what the budget paid for" if error_class is ErrorClass.BUDGET else "what max_duration left"
    message = f"attempt {attempt.number} was stopped after {allowed:.0f} s, which is {limit}" + f"; {detail}" * bool(
        detail
    )
    hint = f"raise limits.{attempt.limit}, or train less; checkpoints are kept"
    return RunError(error_class=error_class, message=message, hint=hint)
