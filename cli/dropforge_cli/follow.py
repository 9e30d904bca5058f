"""Follow a run: read its record and new job events, and show them live on a terminal or line by line in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.errors import Malformed, NotFound
from dropforge.base.figures import duration
from dropforge.run.events import Checkpointed, Failed, JobEvent, Preempted, Started, read_job_events
from dropforge.run.record import Record, RunState
from dropforge.run.series import Kept, Progress, SeriesReader
from dropforge.run.standstill import Standstill, unusual
from dropforge.run.store import RunStore

from .deployment import Deployment
from .endpoints import named_of
from .problems import CliError
from .result import show_result

BAR_WIDTH = 40
LINES_PER_TRAINING = 10  # progress lines without a terminal


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment: the latest progress of the current attempt, and the events since the last snapshot.

    `standstill` is there while the current attempt trains without progress for an unusual time.
    """

    record: Record
    progress: Progress | None = None
    events: list[JobEvent] = field(default_factory=list)
    standstill: Standstill | None = None


class Follower:
    """Takes snapshots of one run. It reads each job event once, and the series of the current attempt."""

    def __init__(self, store: RunStore, run: str) -> None:
        self.store = store
        self.run = run
        self._starts: list[Started] = []
        self._series: dict[int, SeriesReader] = {}
        self._last = names.events_prefix(run)

    def snapshot(self) -> Snapshot | None:
        """Return the run as it is now; None without a record."""
        record = self.store.find(self.run)
        if record is None:
            return None
        if record.run != self.run:  # the spec has joined another run
            self.run, self._last = record.run, names.events_prefix(record.run)
        if not record.attempts:
            return Snapshot(record)
        kept, events = self._kept(record.attempt), self._new_events()
        self._starts += [event for event in events if isinstance(event, Started)]
        progress = kept.series.latest() if kept else None
        return Snapshot(record, progress, events, self._standstill(record, kept))

    def _standstill(self, record: Record, kept: Kept | None) -> Standstill | None:
        """Return an unusual standstill; None also for a spec that this version cannot read."""
        if record.state is not RunState.TRAINING:
            return None
        try:
            limits = self.store.spec(self.run).limits
        except (NotFound, Malformed):
            return None
        return unusual(record, kept, self._starts, limits, utc_now())

    def _kept(self, attempt: int) -> Kept | None:
        """Return the series of an attempt. Only functions can check its proof."""
        reader = self._series.setdefault(attempt, self.store.series_reader(self.run, attempt))
        return reader.read()

    def _new_events(self) -> list[JobEvent]:
        """Return new events in order. Names grow with attempt and sequence, so the list starts after the last name."""
        new = [name for name in self.store.names(names.events_prefix(self.run), self._last) if name != self._last]
        if not new:
            return []
        self._last = new[-1]
        return [event for name in new for event in read_job_events(self.store.read(name).data, self.run)]


def snapshots(deployment: Deployment, run: str) -> Iterator[Snapshot]:
    """Yield snapshots of a run until it is terminal. Raises CliError if the run does not appear."""
    follower = Follower(deployment.store, run)
    appears_by = time.monotonic() + deployment.patience_seconds
    while True:
        snapshot = follower.snapshot()
        if snapshot is not None:
            yield snapshot
            if snapshot.record.state.is_terminal:
                return
        elif time.monotonic() > appears_by:
            message = f"run {run} did not appear within {deployment.patience_seconds:.0f} s after its upload"
            raise CliError(message, f"see the log of the function on_spec_uploaded of {deployment.where}")
        time.sleep(deployment.poll_seconds)


def watch(deployment: Deployment, run: str, out: Console) -> bool:
    """Show a run until it is terminal, then its result; return whether it succeeded. Ctrl-C does not end the run."""
    try:
        record = show_until_terminal(deployment, run, out)
    except KeyboardInterrupt:
        out.print(f"\nthe run continues; `dropforge cancel {run}` ends it")
        raise
    named = named_of(deployment.context.endpoints, record.run)
    show_result(record, named, utc_now(), out, is_local=deployment.stack is not None)
    return record.state is RunState.SUCCEEDED


def show_until_terminal(deployment: Deployment, run: str, out: Console) -> Record:
    """Show a run until it is terminal; return its last record."""
    latest: Record | None = None
    with display_on(out) as display:
        for snapshot in snapshots(deployment, run):
            latest = snapshot.record
            display.show(snapshot)
    assert latest is not None, "snapshots yields at least once or raises"
    return latest


class Display(Protocol):
    """Shows the snapshots of one run."""

    def show(self, snapshot: Snapshot) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def display_on(out: Console) -> Display:
    """Return a live display for a terminal, or one line per change for a pipe."""
    return LiveDisplay(out) if out.is_terminal else LineDisplay(out)


class LineDisplay:
    """One line per change, for logs and pipes."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._entered = 0
        self._seconds = 0.0
        self._tenth = -1
        self._wait = ""
        self._stands: tuple[int | None, bool] | None = None

    def show(self, snapshot: Snapshot) -> None:
        record = snapshot.record
        lines = [(t.time, f"{t.state.lower()}{_where(record, t.attempt)}") for t in record.history[self._entered :]]
        self._entered = len(record.history)
        lines += [(event.time, text) for event in snapshot.events if (text := describe_event(event))]
        if snapshot.progress is not None and self._is_news(snapshot.progress):
            lines.append((snapshot.progress.time, describe_progress(snapshot.progress)))
        for when, text in sorted(lines, key=lambda line: line[0]):
            self._print((when - record.created).total_seconds(), text)
        if (wait := describe_wait(record)) != self._wait:
            self._wait = wait
            if wait:
                self._print((utc_now() - record.created).total_seconds(), wait)
        self._show_standstill(record, snapshot.standstill)

    def _show_standstill(self, record: Record, found: Standstill | None) -> None:
        """Print a standstill when it becomes long, and when it becomes stuck."""
        stands = (found.step, found.is_stuck) if found else None
        if found is not None and stands != self._stands:
            self._print((utc_now() - record.created).total_seconds(), found.verdict)
        self._stands = stands

    def _print(self, seconds: float, text: str) -> None:
        """Print a line. The seconds never decrease: the series comes a moment after events of the same time."""
        self._seconds = max(self._seconds, seconds)
        self._out.print(f"{self._seconds:7.1f} s  {text}")

    def _is_news(self, progress: Progress) -> bool:
        """Return whether progress gets a line: one for each tenth of the training."""
        before, self._tenth = self._tenth, progress.step * LINES_PER_TRAINING // max(1, progress.total_steps)
        return self._tenth != before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveDisplay:
    """The stages with their seconds and a progress bar, redrawn in place."""

    def __init__(self, out: Console) -> None:
        self._snapshot: Snapshot | None = None
        self._live = Live(console=out, refresh_per_second=4, get_renderable=self._render)

    def show(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def _render(self) -> Group | Text:
        if self._snapshot is None:
            return Text("waiting for the run to appear")
        return render(self._snapshot, utc_now())

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)


def render(snapshot: Snapshot, now: datetime) -> Group:
    """Return a run's stages and progress for a terminal."""
    record = snapshot.record
    header = Text.assemble((record.run, "bold"), f"  {_where(record, record.attempt).strip()}")
    stages = Table.grid(padding=(0, 2))
    for state, spent in record.stage_seconds(now).items():
        is_current = state == record.state
        mark = ("▶", "yellow") if is_current else ("✓", "green")
        stages.add_row(Text(*mark), Text(state.lower(), "bold" if is_current else ""), Text(duration(spent), "dim"))
    if record.state.is_terminal:
        succeeded = record.state is RunState.SUCCEEDED
        stages.add_row(
            Text("✓" if succeeded else "✗", "green" if succeeded else "red"), Text(record.state.lower(), "bold")
        )
    parts: list[Text | Table] = [header, stages]
    if wait := describe_wait(record):
        parts.append(Text(wait))
    if snapshot.progress is not None and record.state is RunState.TRAINING:
        parts.append(bar(snapshot.progress, snapshot.standstill))
    if snapshot.standstill is not None:
        parts.append(Text(describe_standstill(record, snapshot.standstill), "yellow"))
    return Group(*parts)


def describe_wait(record: Record) -> str:
    """Return what a run waits for: a place, a machine, its container or its endpoint; "" if it does not wait."""
    if wait := record.queued:
        return f"waits for a place: number {wait.place} by {wait.rule} of the deployment's policy"
    if record.state is RunState.DEPLOYING and record.endpoint_wait_reason:
        return f"the endpoint is not ready: {record.endpoint_wait_reason}"
    if record.state is not RunState.PROVISIONING or not record.attempts or record.attempts[-1].ended:
        return ""
    if reason := record.attempts[-1].wait_reason:
        return f"waits to train: {reason}"
    return "its machine runs; the container has not reported its start" if record.attempts[-1].seen else ""


def describe_standstill(record: Record, found: Standstill) -> str:
    """Return what is unusual about a training without progress, and what people can do."""
    return (
        f"{found.verdict}\nhint: `dropforge logs {record.run}` shows its log; `dropforge cancel {record.run}` ends it"
    )


def bar(progress: Progress, found: Standstill | None) -> Table:
    """Return a progress bar, and its text below it: both fit 80 columns."""
    rows = Table.grid()
    rows.add_row(ProgressBar(float(max(1, progress.total_steps)), float(progress.step), BAR_WIDTH))
    rows.add_row(Text(describe_progress(progress, is_over=found is not None)))
    return rows


def describe_progress(progress: Progress, *, is_over: bool = False) -> str:
    """Return text like `step 40 of 160, loss 1.234, 5,210 tokens/s, 12.0 s left`.

    `is_over`: the time that was left when the training reported says nothing now.
    """
    parts = [f"step {progress.step} of {progress.total_steps}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.eta_seconds is not None and progress.step < progress.total_steps and not is_over:
        parts.append(f"{duration(progress.eta_seconds)} left")
    return ", ".join(parts)


def describe_event(event: JobEvent) -> str:
    """Return one line for a job event; "" if the run's state says the same."""
    if isinstance(event, Started):
        resumed = f", from step {event.resumed_step}" if event.resumed_step else ""
        return f"the container has started on {event.device or 'an unknown device'}{resumed}"
    if isinstance(event, Checkpointed):
        return f"checkpoint at step {event.step}"
    if isinstance(event, Preempted):
        return f"preempted; step {event.step} is saved"
    if isinstance(event, Failed):
        return f"the container failed: {event.error_class}: {event.message}"
    return ""


def _where(record: Record, number: int) -> str:
    attempt = next((a for a in record.attempts if a.number == number), None)
    return "" if attempt is None else f"  attempt {attempt.number} in {attempt.region}"
