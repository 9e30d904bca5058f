"""The values that the pages show of a run, computed from its record, its spec and its events."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from dropforge.base.figures import age, duration, number, usd
from dropforge.endpoints.record import EndpointRecord, EndpointState, Revision, Rollout, RolloutState
from dropforge.platforms.named import Counted
from dropforge.run.events import Started
from dropforge.run.record import Attempt, Endpoint, LedgerEntry, Record, ResourceState, RunState
from dropforge.run.series import Progress
from dropforge.run.spans import Span as TraceSpan
from dropforge.run.spans import in_order
from dropforge.run.standstill import Standstill
from dropforge.run.summary import Served, Summary
from dropforge.spec import JobSpec
from dropforge.stages.rollout.traffic import Traffic

from . import snippets
from .charts import UNITS, Chart, Curve, Point, chart, smoothed
from .reader import Run

UNKNOWN = "\N{EN DASH}"  # never 0
SHOWN_SAMPLES = 5
SHOWN_ROLLOUTS = 10
SHOWN_TEXT = 400  # characters of a sample
LEAST_WIDTH = 6.0  # units of a stage that took no time to speak of
SORTS = {
    "created": "newest",
    "oldest": "oldest",
    "cost": "dearest",
    "metric": "best result",
    "name": "name",
    "state": "state",
}


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
    submitter: str


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
        run.submitter,
    )


def labels(pairs: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in sorted(pairs.items())]


class Wanted(NamedTuple):
    """Which runs a list has, and in which order. An empty field excludes no run.

    `since` and `until` are days in UTC, as 2026-11-26: the first and the last day on which a run was created.
    """

    text: str = ""
    state: str = ""
    target: str = ""
    model: str = ""
    since: str = ""
    until: str = ""
    sort: str = "created"

    def takes(self, run: Summary) -> bool:
        """Whether the run has the state, target, model and day, and each word in its id, name, model, submitter or
        labels."""
        for wanted, found in ((self.state, run.state), (self.target, run.target), (self.model, run.model)):
            if wanted and found != wanted:
                return False
        day = f"{run.created:%Y-%m-%d}"
        if (self.since and day < self.since) or (self.until and day > self.until):
            return False
        words = " ".join([run.run, run.name, run.model or "", run.submitter, *labels(run.labels)]).lower()
        return all(word in words for word in self.text.lower().split())


def selected(runs: Iterable[Summary], wanted: Wanted, now: datetime) -> list[Summary]:
    """Return the wanted runs in their order, one of SORTS. `runs` are newest first."""
    taken = [run for run in runs if wanted.takes(run)]
    by: dict[str, Callable[[Summary], Any]] = {
        "oldest": lambda run: run.created,
        "cost": lambda run: -(run.cost(now) or 0.0),
        "metric": _rank,
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


def figures(run: Run, latest: Progress | None, stands: Standstill | None, now: datetime) -> list[Figure]:
    """Return the numbers that say most about a run at this moment. `stands`: it makes no progress for long."""
    record, spec = run
    shown = []
    if latest is not None:
        is_over = record.state is not RunState.TRAINING or stands is not None or latest.step >= latest.total_steps
        left = f" · {duration(latest.eta_seconds)} left" if latest.eta_seconds and not is_over else ""
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


def percent(record: Record, latest: Progress | None) -> int | None:
    """The share of the training's steps that a training has done; None unless a run trains."""
    if record.state is not RunState.TRAINING or latest is None or not latest.total_steps:
        return None
    return min(100, 100 * latest.step // latest.total_steps)


def measured(record: Record) -> list[tuple[str, str, str]]:
    """Return each metric that was measured before and after the training: its title, and both values."""
    return [
        (name.replace("_", " ").capitalize(), number(record.metrics[f"{name}_before"]), number(value))
        for name, value in record.metrics.items()
        if f"{name}_before" in record.metrics and value is not None
    ]


COUNTS = {
    "rows_train": "Rows trained on",
    "rows_eval": "Rows held out",
    "rows_dropped": "Rows left out",
    "rows_truncated": "Sequences cut",
}


def counted(record: Record) -> list[tuple[str, str]]:
    """Return what the training counted in its data, with a title each; [] before it has succeeded."""
    counts = record.metrics
    shown = [(title, number(counts[name])) for name, title in COUNTS.items() if name in counts]
    if "answers_given" in counts:
        shown.append(("Answers learnt", f"{_known(counts.get('answers_learnt'))} of {_known(counts['answers_given'])}"))
    return shown


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


class Part(NamedTuple):
    """A span of the run's trace as a row: `x` and `width` of its bar are in percent of the run's time."""

    label: str
    depth: int
    after: str
    lasted: str
    x: float
    width: float
    tone: str
    problem: str


def parts(spans: Sequence[TraceSpan], now: datetime) -> list[Part]:
    """Return the spans of a run (run/spans.py) as a tree. A span may last longer than the run, as its endpoint does."""
    root = spans[0]
    whole = max(root.seconds(now), 1e-6)
    shown = []
    for span in in_order(spans):
        begins, ends = (
            min(max((time - root.began).total_seconds() / whole, 0.0), 1.0) for time in (span.began, span.ended or now)
        )
        x = min(100 * begins, 99.0)
        shown.append(
            Part(
                span.label,
                min(span.depth, 3),
                duration((span.began - root.began).total_seconds()),
                duration(span.seconds(now)) + ("" if span.ended else " so far"),
                round(x, 2),
                round(max(100 * (ends - begins), 0.5), 2),
                _tone(span),
                f"{span.error_type}: {span.problem}" if span.problem else "",
            )
        )
    return shown


def _tone(span: TraceSpan) -> str:
    if span.problem:
        return "bad"
    return "hatch" if span.name.startswith("wait") else "off" if span.ended else "run"


class Axis(NamedTuple):
    """The x axis of the curves: where an event lies on it (None: unknown), and the text of its labels."""

    place: Callable[[Progress], float | None]
    text: Callable[[float], str]


AXES: dict[str, Axis] = {
    "step": Axis(lambda event: float(event.step), lambda x: f"{x:,.0f}" if x == round(x) else f"{x:g}"),
    "epoch": Axis(lambda event: event.epoch or 0.0, lambda x: f"{x:.4g}"),
    "tokens": Axis(lambda event: event.tokens, lambda x: f"{x:,.0f}" if x < 1e6 else f"{x / 1e6:g} M"),
    "time": Axis(lambda event: event.time.timestamp(), lambda x: duration(x) if x >= 120 else f"{x:.0f} s"),
}


class Curves(NamedTuple):
    """The curves of a run's training; each is None without a value."""

    loss: Chart | None
    has_held_out: bool
    learning_rate: Chart | None
    throughput: Chart | None
    accelerator: Chart | None
    busy: Chart | None
    host: Chart | None


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
    losses, older = _losses(order, by), smoothed(loss_points(before, by))
    summary = f"Training loss by {by}: from {number(losses[0][1])} to {number(losses[-1][1])}" if losses else ""
    held_out = _points(order, by, _held_out)
    if held_out:
        summary += f"; on held-out rows from {number(held_out[0][1])} to {number(held_out[-1][1])}"
    shown = [
        Curve("past", older),
        Curve("pale", losses),
        Curve("bold", smoothed(losses)),
        Curve("held", held_out, has_dots=True),
    ]
    loss = (
        chart(shown, summary, x_end=end, x_text=axis.text, logarithmic=log, marks=_resumes(starts, by))
        if losses
        else None
    )
    return Curves(
        loss,
        bool(held_out),
        one("Learning rate", lambda event: event.learning_rate),
        one("Tokens per second", lambda event: event.tokens_per_second),
        one("Accelerator memory in GiB", lambda event: _gib(event.accelerator_mib)),
        one("Accelerator busy in %", lambda event: _percent(event.accelerator_busy)),
        one("Host memory in GiB", lambda event: _gib(event.host_mib)),
    )


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _gib(mib: int | None) -> float | None:
    return None if mib is None else mib / 1024


def loss_points(progress: Sequence[Progress], by: str) -> list[Point]:
    """Return the losses of a run, each once: a training measures its loss less often than it reports it."""
    return _losses(_without_lost_steps(progress), by)


def _losses(order: Sequence[Progress], by: str) -> list[Point]:
    new = [event for event, last in zip(order, [None, *order], strict=False) if not last or event.loss != last.loss]
    return _points(new, by, lambda event: event.loss)


def held_out_points(progress: Sequence[Progress], by: str) -> list[Point]:
    """Return the losses on held-out rows, which the training has measured now and then."""
    return _points(_without_lost_steps(progress), by, _held_out)


def _held_out(event: Progress) -> float | None:
    return event.held_out_loss


def _points(events: Sequence[Progress], by: str, value: Callable[[Progress], float | None]) -> list[Point]:
    """The known values; the first event is the zero of the axis "time"."""
    began = events[0].time.timestamp() if by == "time" and events else 0.0
    place = AXES[by].place
    return [(x - began, y) for event in events if (y := value(event)) is not None and (x := place(event)) is not None]


def _without_lost_steps(progress: Sequence[Progress]) -> list[Progress]:
    """The points in order, without the steps that a later attempt repeated: it resumed at a checkpoint before them."""
    kept: list[Progress] = []
    for point in sorted(progress, key=lambda point: (point.time, point.attempt)):
        while kept and kept[-1].attempt != point.attempt and kept[-1].step >= point.step:
            kept.pop()
        kept.append(point)
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
    EndpointState.SUSPENDED: Status("Suspended", "hold", "sand"),
    EndpointState.RETIRED: Status("Retired", "off", "bar"),
}


class Version(NamedTuple):
    """A revision of a named endpoint, and its requests of the last hour; a dash is an unknown value."""

    number: int
    run: str
    share: str
    status: Status
    requests: str
    errors: str
    latency: str
    cost: str


def versions(record: EndpointRecord, now: datetime, traffic: Traffic | None) -> list[Version]:
    """Return the revisions of an endpoint, newest first."""
    shares = _shares(record)
    return [
        Version(
            revision.number,
            revision.run,
            f"{shares[revision.number]} %" if shares.get(revision.number) else UNKNOWN,
            _version_status(record, revision, shares),
            *_counted(traffic.of(record, revision.revision) if traffic and revision.revision else None),
            usd(revision.cost(now)),
        )
        for revision in record.revisions[::-1][:SHOWN_ROLLOUTS]
    ]


def _shares(record: EndpointRecord) -> dict[int, int]:
    """The percentage of the requests that each revision gets, by its number. A canary has its share from the rest."""
    if record.state is not EndpointState.SERVING:
        return {}
    rollout = record.current
    if rollout is None or rollout.state is not RolloutState.WATCHING or rollout.canary is None:
        return {record.stable: 100}
    return {record.stable: 100 - rollout.canary.percent, rollout.revision: rollout.canary.percent}


def _version_status(record: EndpointRecord, revision: Revision, shares: Mapping[int, int]) -> Status:
    if revision.number == record.stable and shares:
        return Status("serves", "good", "tick")
    if revision.number in shares:
        return Status("canary", "run", "half")
    return Status("before" if revision.promoted else "never promoted", "off", "ring")


def _counted(counted: Counted | None) -> tuple[str, str, str]:
    if counted is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    latency = UNKNOWN if counted.latency_ms is None else f"{counted.latency_ms:,.0f} ms"
    return f"{counted.requests:,}", f"{counted.errors:,}", latency


def snippet(name: str, endpoint: Endpoint, spec: JobSpec) -> str:
    """Return a command that asks an endpoint with the template of the training. It has no row of the data."""
    return snippets.snippet("curl", endpoint, snippets.template_of(spec), snippets.export_of(spec, name))


class Named(NamedTuple):
    """A named endpoint. `can_return`: a rollback is possible. `can_end`: the endpoint can be retired."""

    name: str
    status: Status
    base_url: str
    serving: Revision | None
    cost: str
    expires: datetime | None
    can_return: bool
    can_end: bool
    rollouts: list[Rollout]
    versions: list[Version]
    uncounted: str
    snippet: str


def named(record: EndpointRecord, now: datetime, traffic: Traffic | None = None, snippet: str = "") -> Named:
    """Return an endpoint with its newest rollouts first."""
    rollout = record.current
    if rollout is not None:
        shown = Status(str(rollout.state).replace("_", " ").capitalize(), "run", "arrow")
    else:
        shown = _NAMED.get(record.state, Status(str(record.state).capitalize(), "off", "ring"))
    can_end = rollout is None and record.state is not EndpointState.RETIRED
    can_return = bool(record.previous) and rollout is None and record.state is EndpointState.SERVING
    return Named(
        record.name,
        shown,
        record.base_url,
        record.serving,
        usd(record.cost(now)),
        record.expires,
        can_return,
        can_end,
        record.rollouts[::-1][:SHOWN_ROLLOUTS],
        versions(record, now, traffic),
        traffic.problems.get(record.name, "") if traffic else "",
        snippet,
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


def _result(run: Summary) -> tuple[str, float] | None:
    """The metric that says most about a run: that of its gate, else exact match, else the loss; None without one."""
    for name in (run.about.metric if run.about else "", "exact_match", "loss"):
        if (value := run.metrics.get(name)) is not None:
            return name, value
    return None


def _rank(run: Summary) -> tuple[bool, str, float]:
    """The place of a run by its result: the best value of each metric first. Of losses, the lowest is the best."""
    if (result := _result(run)) is None:
        return True, "", 0.0
    name, value = result
    return False, name, value if "loss" in name else -value


def _main_metric(run: Summary) -> str:
    result = _result(run)
    return UNKNOWN if result is None else f"{result[0].replace('_', ' ')} {number(result[1])}"


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
