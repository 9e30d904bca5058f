"""The values that the pages show of a run, computed from its record, its spec and its events."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from dropforge.base.figures import age, duration, number, usd
from dropforge.endpoints.record import EndpointRecord, EndpointState, Revision, Rollout
from dropforge.run.events import Progress, Started
from dropforge.run.record import Attempt, LedgerEntry, Record, ResourceState, RunState
from dropforge.run.summary import Served, Summary
from dropforge.spec import JobSpec

from .charts import UNITS, Chart, Curve, Point, chart, smoothed
from .reader import Run

UNKNOWN = "\N{EN DASH}"  # never 0
SHOWN_SAMPLES = 5
SHOWN_ROLLOUTS = 10
SHOWN_TEXT = 400  # characters of a sample
LEAST_WIDTH = 6.0  # units of a stage that took no time to speak of
SORTS = ("created", "cost", "name", "state")


class Status(NamedTuple):
    """A state as people see it: its tone is a CSS class, its icon a symbol of the page. Shape and colour both tell."""

    word: str
    tone: str
    icon: str


_STATUS = {
    RunState.ACCEPTED: Status("Accepted", "off", "ring"),
    RunState.PROVISIONING: Status("Starting", "run", "ring"),
    RunState.TRAINING: Status("Training", "run", "half"),
    RunState.DEPLOYING: Status("Deploying", "run", "arrow"),
    RunState.TEARING_DOWN: Status("Deleting", "off", "dashes"),
    RunState.SUCCEEDED: Status("Succeeded", "good", "tick"),
    RunState.FAILED: Status("Failed", "fail", "cross"),
    RunState.CANCELLED: Status("Cancelled", "off", "bar"),
    RunState.REJECTED: Status("Rejected", "fail", "triangle"),
}
_ATTEMPT_ENDS = {"success": Status("succeeded", "good", "tick"), "cancelled": Status("cancelled", "off", "bar")}


def status(run: Summary) -> Status:
    """Return the state of a run; a run that waits says so."""
    if run.place is not None:
        return Status(f"Waiting, place {run.place}", "hold", "sand")
    if run.is_waiting and run.state in (RunState.PROVISIONING, RunState.DEPLOYING):
        return Status("Waiting", "hold", "sand")
    return _STATUS[run.state]


def wait_text(record: Record) -> str:
    """Return the reason why a run waits, or why its last attempt waited when the run ended; "" without a reason."""
    if record.queued is not None:
        return f"Waits for a place by {record.queued.rule}: number {record.queued.place} in the queue."
    return record.wait_reason


class Row(NamedTuple):
    """A run in the list."""

    run: str
    name: str
    status: Status
    target: str
    model: str
    metric: str
    endpoint: str
    cost: str
    created: datetime
    labels: list[str]


def row(run: Summary, now: datetime) -> Row:
    return Row(
        run.run,
        run.name or run.run,
        status(run),
        run.target or UNKNOWN,
        run.model or UNKNOWN,
        _main_metric(run),
        _lifetime(run.endpoint, now),
        usd(run.cost(now)),
        run.created,
        labels(run.labels),
    )


def labels(pairs: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in sorted(pairs.items())]


class Wanted(NamedTuple):
    """Which runs a list has, and in which order. An empty field excludes no run."""

    text: str = ""
    state: str = ""
    target: str = ""
    sort: str = "created"

    def takes(self, run: Summary) -> bool:
        """Whether the run has the state and the target, and each word in its id, name, model or labels."""
        if (self.state and run.state != self.state) or (self.target and run.target != self.target):
            return False
        words = " ".join([run.run, run.name, run.model or "", *labels(run.labels)]).lower()
        return all(word in words for word in self.text.lower().split())


def selected(runs: Iterable[Summary], wanted: Wanted, now: datetime) -> list[Summary]:
    """Return the wanted runs: newest first, dearest first, or by name or state. `runs` are newest first."""
    taken = [run for run in runs if wanted.takes(run)]
    by: dict[str, Callable[[Summary], str | float]] = {
        "cost": lambda run: -(run.cost(now) or 0.0),
        "name": lambda run: run.name,
        "state": lambda run: list(RunState).index(run.state),
    }
    return sorted(taken, key=by[wanted.sort]) if wanted.sort in by else taken


class Figure(NamedTuple):
    """A large number: its title, the value, its unit, and a note below."""

    title: str
    value: str
    unit: str = ""
    note: str = ""


def figures(run: Run, latest: Progress | None, now: datetime) -> list[Figure]:
    """Return the numbers that say most about a run at this moment."""
    record, spec = run
    shown = []
    if latest is not None:
        left = f" · {duration(latest.eta_seconds)} left" if latest.eta_seconds and not record.state.is_terminal else ""
        shown = [
            Figure("Progress", f"{latest.step:,}", f"of {latest.total_steps:,} steps{left}"),
            Figure("Training loss", _known(latest.loss)),
            Figure("Throughput", _known(latest.tokens_per_second), "tokens/s"),
        ]
    shown += [Figure(title, value, note=f"{before} before the training") for title, before, value in measured(record)][
        :2
    ]
    budget = spec.limits.max_cost_usd if spec else None
    shown.append(Figure("Cost so far", usd(record.cost(now)), f"of {usd(budget)}" if budget else ""))
    return shown


def measured(record: Record) -> list[tuple[str, str, str]]:
    """Return each metric that was measured before and after the training: its title, and both values."""
    return [
        (name.replace("_", " ").capitalize(), number(record.metrics[f"{name}_before"]), number(value))
        for name, value in record.metrics.items()
        if f"{name}_before" in record.metrics and value is not None
    ]


class Stage(NamedTuple):
    """A part of the timeline, in units from the left. `tone` is a CSS class."""

    x: float
    width: float
    tone: str
    label: str
    title: str


class Span(NamedTuple):
    began: datetime
    ended: datetime
    tone: str
    word: str


def timeline(record: Record, now: datetime) -> list[Stage]:
    """Return the stages of a run in order, as long as they lasted. Waiting has its own tone."""
    spans = [span for span in _spans(record, now) if span.ended > span.began]
    total = sum((span.ended - span.began).total_seconds() for span in spans)
    free = UNITS - LEAST_WIDTH * len(spans)
    stages, x = [], 0.0
    for span in spans:
        seconds = (span.ended - span.began).total_seconds()
        width = LEAST_WIDTH + free * seconds / total
        text = f"{span.word} {duration(seconds)}"
        label = text if width >= 9 * len(text) else ""
        stages.append(Stage(round(x, 1), round(width, 1), span.tone, label, text))
        x += width
    return stages


def _spans(record: Record, now: datetime) -> Iterable[Span]:
    ends = [*(entry.time for entry in record.history[1:]), record.history[-1].time if record.state.is_terminal else now]
    running = {attempt.number: attempt.running for attempt in record.attempts}
    for entry, ended in zip(record.history, ends, strict=True):
        if entry.state.is_terminal:
            continue
        tone, word = _STAGES[entry.state]
        if entry.state is not RunState.PROVISIONING:
            again = (
                f" (attempt {entry.attempt})" if entry.state is RunState.TRAINING and len(record.attempts) > 1 else ""
            )
            yield Span(entry.time, ended, tone, word + again)
            continue
        started = min(max(running.get(entry.attempt) or ended, entry.time), ended)
        yield Span(entry.time, started, "hatch", "waiting")
        yield Span(started, ended, tone, word)


_STAGES = {
    RunState.ACCEPTED: ("off", "accepted"),
    RunState.PROVISIONING: ("off", "starting"),
    RunState.TRAINING: ("run", "training"),
    RunState.DEPLOYING: ("old", "deploying"),
    RunState.TEARING_DOWN: ("off", "deleting"),
}


class Axis(NamedTuple):
    """The x axis of the curves: where an event lies on it, and the text of its labels."""

    place: Callable[[Progress], float]
    text: Callable[[float], str]


AXES: dict[str, Axis] = {
    "step": Axis(lambda event: float(event.step), lambda x: f"{x:,.0f}" if x == round(x) else f"{x:g}"),
    "epoch": Axis(lambda event: event.epoch or 0.0, lambda x: f"{x:.4g}"),
    "time": Axis(lambda event: event.time.timestamp(), lambda x: duration(x) if x >= 120 else f"{x:.0f} s"),
}


class Curves(NamedTuple):
    """The curves of a run's training; each is None without a value."""

    loss: Chart | None
    learning_rate: Chart | None
    throughput: Chart | None


def curves(
    progress: Sequence[Progress], starts: Sequence[Started], before: Sequence[Progress], by: str, log: bool
) -> Curves:
    """Return the curves of a run over steps, epochs or time. `before` is the progress of the run before."""
    axis, order = AXES[by], _without_lost_steps(progress)

    def one(name: str, value: Callable[[Progress], float | None]) -> Chart | None:
        drawn = _points(order, by, value)
        summary = f"{name} by {by}: {number(drawn[-1][1])} at the end" if drawn else ""
        return chart([Curve("bold", drawn)], summary, x_text=axis.text, x_end=end, from_zero=True)

    end = float(order[-1].total_steps) if by == "step" and order else 0.0
    losses, older = loss_points(progress, by), smoothed(loss_points(before, by))
    summary = f"Training loss by {by}: from {number(losses[0][1])} to {number(losses[-1][1])}" if losses else ""
    shown = [Curve("past", older), Curve("pale", losses), Curve("bold", smoothed(losses))]
    loss = (
        chart(shown, summary, x_end=end, x_text=axis.text, logarithmic=log, marks=_resumes(starts, by))
        if losses
        else None
    )
    return Curves(
        loss,
        one("Learning rate", lambda event: event.learning_rate),
        one("Tokens per second", lambda event: event.tokens_per_second),
    )


def loss_points(progress: Sequence[Progress], by: str) -> list[Point]:
    """Return the losses of a run, each once: a training measures its loss less often than it reports it."""
    order = _without_lost_steps(progress)
    new = [event for event, last in zip(order, [None, *order], strict=False) if not last or event.loss != last.loss]
    return _points(new, by, lambda event: event.loss)


def _points(events: Sequence[Progress], by: str, value: Callable[[Progress], float | None]) -> list[Point]:
    """The known values; the first event is the zero of the axis "time"."""
    began = events[0].time.timestamp() if by == "time" and events else 0.0
    return [(AXES[by].place(event) - began, found) for event in events if (found := value(event)) is not None]


def _without_lost_steps(progress: Sequence[Progress]) -> list[Progress]:
    """The events in order, without the steps that a later attempt repeated: it resumed at a checkpoint before them."""
    kept: list[Progress] = []
    for event in sorted(progress, key=lambda event: (event.time, event.attempt, event.sequence)):
        while kept and kept[-1].attempt != event.attempt and kept[-1].step >= event.step:
            kept.pop()
        kept.append(event)
    return kept


def _resumes(starts: Sequence[Started], by: str) -> list[tuple[float, str]]:
    if by != "step":
        return []
    return [
        (float(start.resumed_step), f"attempt {start.attempt} resumes, step {start.resumed_step:,}")
        for start in starts
        if start.attempt > 1 and start.resumed_step
    ]


class Try(NamedTuple):
    """An attempt in its table."""

    number: int
    status: Status
    region: str
    lasted: str
    cost: str
    why: str


def attempts(record: Record, now: datetime) -> list[Try]:
    return [
        Try(
            attempt.number,
            _attempt_status(attempt),
            attempt.region,
            duration(((attempt.ended or now) - attempt.started).total_seconds()),
            usd(attempt.cost(now)),
            attempt.error.message if attempt.error else attempt.wait_reason,
        )
        for attempt in record.attempts
    ]


def _attempt_status(attempt: Attempt) -> Status:
    if attempt.ended is None:
        return Status("runs", "run", "half") if attempt.running else Status("waits", "hold", "sand")
    return _ATTEMPT_ENDS.get(attempt.ending, Status(attempt.ending.lower().replace("_", " "), "fail", "cross"))


_RESOURCE = {
    ResourceState.INTENDED: Status("asked for", "hold", "ring"),
    ResourceState.CREATED: Status("exists", "run", "half"),
    ResourceState.GONE: Status("gone", "off", "tick"),
}


class Resource(NamedTuple):
    """A cloud resource of a run. `since` is when its state was seen."""

    kind: str
    name: str
    status: Status
    since: datetime


def resources(entries: Iterable[LedgerEntry]) -> list[Resource]:
    return [
        Resource(
            e.kind.rpartition("/")[2], e.name.rpartition("/")[2], _RESOURCE[e.state], e.gone or e.created or e.intended
        )
        for e in entries
    ]


_NAMED = {
    EndpointState.SERVING: Status("Serving", "good", "tick"),
    EndpointState.RETIRED: Status("Retired", "off", "bar"),
}


class Named(NamedTuple):
    """A named endpoint. `can_return`: a model served before, so a rollback is possible."""

    name: str
    status: Status
    base_url: str
    serving: Revision | None
    cost: str
    expires: datetime | None
    can_return: bool
    rollouts: list[Rollout]


def named(record: EndpointRecord, now: datetime) -> Named:
    """Return an endpoint with its newest rollouts first."""
    rollout = record.current
    if rollout is not None:
        shown = Status(str(rollout.state).replace("_", " ").capitalize(), "run", "arrow")
    else:
        shown = _NAMED.get(record.state, Status(str(record.state).capitalize(), "off", "ring"))
    can_return = bool(record.previous) and rollout is None and record.state is not EndpointState.RETIRED
    return Named(
        record.name,
        shown,
        record.base_url,
        record.serving,
        usd(record.cost(now)),
        record.expires,
        can_return,
        record.rollouts[::-1][:SHOWN_ROLLOUTS],
    )


class Sample(NamedTuple):
    """A held-out question with the expected answer, and the answers before and after the training."""

    question: str
    expected: str
    before: str
    after: str
    is_right: bool


def samples(rows: Iterable[dict[str, object]]) -> list[Sample]:
    """Return the first held-out rows. Fields of any type are text: a container has written them."""
    shown = []
    for found in list(rows)[:SHOWN_SAMPLES]:
        prompt = found.get("prompt")
        messages = prompt if isinstance(prompt, list) else [{"content": prompt}]
        question = messages[-1].get("content", "") if messages and isinstance(messages[-1], dict) else ""
        texts = [short(text) for text in (question, found.get("expected"), found.get("before"), found.get("after"))]
        shown.append(Sample(texts[0], texts[1], texts[2], texts[3], texts[3].strip() == texts[1].strip() != ""))
    return shown


class Changed(NamedTuple):
    """A line of a comparison: `kind` is "add", "del" or "ctx"."""

    kind: str
    text: str


def spec_text(spec: JobSpec) -> str:
    """Return a spec as its user would write it: without the fields that have their default."""
    document = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return json.dumps(document, indent=2, ensure_ascii=False)


def spec_diff(spec: JobSpec, before: JobSpec) -> list[Changed]:
    """Return the lines in which a spec differs from another spec, with two lines around each."""
    kinds = {"+": "add", "-": "del", " ": "ctx"}
    lines = difflib.unified_diff(spec_text(before).splitlines(), spec_text(spec).splitlines(), lineterm="", n=2)
    return [Changed(kinds[line[0]], line) for line in lines if line[:3] not in ("---", "+++") and line[0] in kinds]


def _known(value: float | None) -> str:
    return UNKNOWN if value is None else number(value)


def _main_metric(run: Summary) -> str:
    for name in (run.about.metric if run.about else "", "exact_match", "loss"):
        if (value := run.metrics.get(name)) is not None:
            return f"{name.replace('_', ' ')} {number(value)}"
    return UNKNOWN


def _lifetime(endpoint: Served | None, now: datetime) -> str:
    if endpoint is None:
        return UNKNOWN
    if endpoint.ended:
        return "ended"
    left = (endpoint.expires - now).total_seconds()
    return f"{age(left)} left" if left > 0 else "expired"


def short(value: object) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}…"
