"""Job events, and the progress of an attempt. Threads of their own send them: they neither delay nor fail training."""

from __future__ import annotations

import math
import os
import queue
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dropforge.base.errors import ErrorClass
from dropforge.base.log import log
from dropforge.base.redact import cut
from dropforge.base.threads import Thread
from dropforge.cloud.clients import Clients
from dropforge.run.artifacts import Manifest, manifest_uri
from dropforge.run.events import (
    MAX_HINT,
    MAX_TEXT,
    Checkpointed,
    EndBase,
    Failed,
    JobEvent,
    Preempted,
    Started,
    Succeeded,
    job_event_message,
)
from dropforge.run.series import Progress

from .errors import JobError
from .host import THIS_MACHINE, Host
from .job import Job
from .outcome import Outcome
from .redactor import Redactor
from .series import SeriesWriter

# Each point may cost a write of the series. The longer the training, the rarer its points.
PROGRESS_SECONDS, PROGRESS_MOST_SECONDS = 2.0, 30.0  # between two points
PROGRESS_SHARE = 0.01  # of the time trained so far
PROGRESS_STEPS, PROGRESS_STEPS_SECONDS = 20, 60.0  # so many steps are a point, too, while the training is that short
LOGGED_SECONDS = 10.0  # the shortest time between two lines of progress in the log
HELD_SECONDS = 1.0  # the longest time for which the event of the start waits for the end of the attempt
FLUSH_SECONDS = 10.0
_PUBLISH_SECONDS = 20.0
_QUEUE_EVENTS = 256


class Reporter:
    """Publishes the job events of one attempt to the job-events topic, in the order in which they were sent.

    The event of the start waits for at most `held` seconds: if the attempt ends by then, the event of its end tells the
    start, too, and wakes the execution once. Any other event sends the start at once, and so does `close`.
    Progress wakes no execution, so it is no event: it goes to the attempt's series in the runs bucket.
    """

    def __init__(
        self, job: Job, redact: Redactor, clients: Clients, held: float = HELD_SECONDS, host: Host = THIS_MACHINE
    ) -> None:
        self._job, self._redact, self._clients, self._held, self._clock = job, redact, clients, held, host.clock
        self._sequence = 0
        self._unpublished = 0
        self._queue: queue.Queue[JobEvent | None] = host.threads.queue(_QUEUE_EVENTS)
        self._series = SeriesWriter(job, redact, clients, host)
        self._thread: Thread | None = None
        if job.topic and job.world.rank in (None, 0):
            self._thread = host.threads.start("job-events", self._publish_all)

    def connect(self) -> None:
        """Make the client that publishes. A failure is tried again, and logged, with the first event."""
        if self._thread is not None:
            with suppress(Exception):
                self._clients.publisher()

    def started(self, resumed_step: int, device: str) -> None:
        self._send(Started(**self._base(), resumed_step=resumed_step, device=device))

    def progress(self, **fields: Any) -> None:
        self._keep(Progress(attempt=self._job.attempt, time=self._clock.now(), **fields))

    def checkpointed(self, step: int, uri: str) -> None:
        self._send(Checkpointed(**self._base(), step=step, uri=uri))

    def succeeded(self, manifest: Manifest) -> None:
        uri = manifest_uri(self._job.bucket, manifest.run)
        self._send(Succeeded(**self._base(), manifest_uri=uri, metrics=manifest.metrics))

    def ended(self, outcome: Outcome) -> None:
        """The last event of an attempt that did not succeed."""
        if outcome.reason == "deadline":
            self.out_of_time(outcome.step)
        elif outcome.reason == "preempted":
            self.preempted(outcome.step)
        elif outcome.error_class:
            self.failed(outcome.error)

    def failed(self, error: JobError) -> None:
        message, hint = cut(self._redact(error.message), MAX_TEXT), cut(self._redact(error.hint), MAX_HINT)
        self._send(Failed(**self._base(), error_class=error.error_class, message=message, hint=hint))

    def preempted(self, step: int) -> None:
        self._send(Preempted(**self._base(), step=step))

    def out_of_time(self, step: int) -> None:
        message = f"stopped before the deadline; the last checkpoint is of step {step}"
        hint = "raise limits.max_duration or limits.max_cost_usd, or train less; checkpoints are kept"
        self._send(Failed(**self._base(), error_class=ErrorClass.DEADLINE, message=message, hint=hint))

    def close(self, timeout: float = FLUSH_SECONDS) -> None:
        """Wait at most `timeout` seconds until the queued events are published, and the series is written."""
        if self._thread is None or not self._thread.is_alive():
            return
        deadline = self._clock.monotonic() + timeout
        self._series.close()
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline - self._clock.monotonic()))
        self._series.wait(max(0.0, deadline - self._clock.monotonic()))
        if self._thread.is_alive():
            log("job events were still unpublished at exit", stage="train", run=self._job.run, severity="WARNING")

    def _base(self) -> dict[str, Any]:
        now = self._clock.now()
        # Milliseconds: a restarted attempt continues above the sequences that it sent before. Strictly increasing.
        self._sequence = max(self._sequence + 1, int(now.timestamp() * 1000))
        return {"run": self._job.run, "attempt": self._job.attempt, "sequence": self._sequence, "time": now}

    def _keep(self, point: Progress) -> None:
        if self._thread is not None:
            self._series.add(point)

    def _send(self, event: JobEvent) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put(event, timeout=1.0)
        except queue.Full:
            log(f"dropped a {event.type} event", stage="train", run=self._job.run, severity="WARNING")

    def _events(self) -> Iterator[JobEvent]:
        """The events to publish: those of the queue, until it has None."""
        event = self._queue.get()
        while event is not None:
            if isinstance(event, Started):
                event = yield from self._after(event)
            else:
                yield event
                event = self._queue.get()

    def _after(self, started: Started) -> Generator[JobEvent, None, JobEvent | None]:
        """Return what follows the start in the queue: the end of the attempt takes the start with it."""
        try:
            event = self._queue.get(timeout=self._held)
        except queue.Empty:
            yield started
            return self._queue.get()
        if isinstance(event, EndBase):
            return event.with_start(started)
        yield started
        return event

    def _publish_all(self) -> None:
        for event in self._events():
            data, attributes = job_event_message(event, self._job.key)
            try:
                publisher = self._clients.publisher()
                publisher.publish(self._job.topic, data, timeout=_PUBLISH_SECONDS, **attributes).result(
                    _PUBLISH_SECONDS
                )
            except Exception as error:  # noqa: BLE001  (a failure of Pub/Sub must not fail the run)
                self._unpublished += 1
                if self._unpublished in (1, 10, 100, 1000):
                    message = self._redact(f"{self._unpublished} job events not published; the last: {error!r}")
                    log(message, stage="train", run=self._job.run, severity="WARNING")


def progress_seconds(trained: float) -> float:
    """The time between two points of the series after `trained` seconds of training: from 2 to 30 seconds."""
    return min(max(PROGRESS_SECONDS, PROGRESS_SHARE * trained), PROGRESS_MOST_SECONDS)


class Load(NamedTuple):
    """The load of a training on its machine: memory in MiB, and the share of time in which the accelerator computes.

    A field is None where nobody can measure it.
    """

    accelerator_mib: int | None = None
    host_mib: int | None = None
    accelerator_busy: float | None = None


def resident_mib() -> int | None:
    """The machine's memory that this process has; None where the kernel does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return (pages * os.sysconf("SC_PAGE_SIZE")) >> 20


class ProgressMeter:
    """Decides when to report progress, and measures the speed from the trainer's step and token counts."""

    def __init__(
        self,
        reporter: Reporter,
        total_steps: int,
        clock: Callable[[], float] = time.monotonic,
        load: Callable[[], Load] = Load,
    ) -> None:
        self._reporter = reporter
        self._load = load
        self._clock = clock
        self._total = total_steps
        self._began = 0.0
        self._last: tuple[int, int, float] | None = None
        self._loss: float | None = None
        self._learning_rate: float | None = None
        self._held_out: float | None = None
        self._logged = -math.inf

    def begin(self, step: int, tokens: int) -> None:
        """Training starts, or resumes, at `step`."""
        self._began = self._clock()
        self._last = (step, tokens, self._began)

    def note(self, loss: float | None, learning_rate: float | None) -> None:
        """Keep the latest logged loss and learning rate; None keeps the previous value."""
        self._loss = self._loss if loss is None else loss
        self._learning_rate = self._learning_rate if learning_rate is None else learning_rate

    def note_held_out(self, loss: float, seconds: float) -> None:
        """Keep the loss on held-out rows, for a report of this step. Its `seconds` are no time of training."""
        assert self._last is not None, "call begin first"
        step, tokens, then = self._last
        self._last = (step, tokens, then + seconds)
        self._held_out = loss

    def step(self, step: int, tokens: int, epoch: float | None) -> None:
        """Count a finished step; report it if a report is due. The last step always is, as one with a held-out loss."""
        assert self._last is not None, "call begin first"
        before, tokens_before, then = self._last
        now = self._clock()
        elapsed, trained = now - then, now - self._began
        is_many = step - before >= PROGRESS_STEPS and trained < PROGRESS_STEPS_SECONDS
        can_wait = step < self._total and self._held_out is None
        if can_wait and not is_many and elapsed < progress_seconds(trained):
            return
        self._last = (step, tokens, now)
        rate = (step - before) / elapsed if elapsed > 0 else None
        self._reporter.progress(
            step=step,
            total_steps=self._total,
            epoch=epoch,
            loss=self._loss,
            learning_rate=self._learning_rate,
            tokens_per_second=round((tokens - tokens_before) / elapsed, 1) if elapsed > 0 else None,
            eta_seconds=round((self._total - step) / rate, 1) if rate else None,
            **self._load()._asdict(),
            tokens=tokens,
            held_out_loss=self._held_out,
        )
        self._held_out = None
        self._log(step)

    def _log(self, step: int) -> None:
        """Write the progress into the log, which people read after the run: the first, the last, and now and then."""
        now = self._clock()
        if step < self._total and now - self._logged < LOGGED_SECONDS:
            return
        self._logged = now
        loss = self._loss if self._loss is not None and math.isfinite(self._loss) else None
        log("training", stage="train", step=step, total_steps=self._total, loss=loss)
