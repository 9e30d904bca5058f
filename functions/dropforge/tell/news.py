"""What a message to people says, before a channel gives it its form: a title, a few lines, and a link.

The lines say why, what it costs, and what to do. Each line is a single line, is at most MAX_LINE characters long, and
has no credentials. Title, lines and the channel's line with the ids have at most MAX_LINES lines together.
"""

from __future__ import annotations

import json
import math
import shlex
from datetime import datetime
from typing import Any, NamedTuple

from dropforge.base.errors import ErrorClass
from dropforge.base.figures import NOT_FINITE, duration
from dropforge.base.redact import cut
from dropforge.base.settings import Settings
from dropforge.money.limits import short_endpoint
from dropforge.run.events import RunEvent
from dropforge.run.record import Endpoint, Notice, Record, RunState, Tone
from dropforge.spec import JobSpec

from .facts import MAX_LINE, cost_of, one_line, source_of
from .run_events import notice_event, state_event

MAX_LINES = 10
_SHOWN_PROBLEMS, _SHOWN_METRICS = 4, 4
_TOLD = (RunState.ACCEPTED, RunState.TRAINING)  # and each end
# What to do about an error that has no hint.
_REMEDIES = {
    ErrorClass.QUOTA: "raise the quota or add placements, then submit the spec again",
    ErrorClass.STOCKOUT: "add placements in other regions, then submit the spec again",
    ErrorClass.GATE: "train with other data or settings, or change the gate; the model is kept, but not served",
    ErrorClass.PARITY: "find the difference that the message names; the model is kept, but not served",
    ErrorClass.DEADLINE: "raise limits.max_duration, then submit the spec again",
    ErrorClass.BUDGET: "raise limits.max_cost_usd, then submit the spec again",
    ErrorClass.OUT_OF_MEMORY: "reduce max_length or the batch, or choose a larger accelerator, then submit again",
}
_REMEDY = "correct the cause, then submit the spec again"


class Line(NamedTuple):
    """A line of a message. `link` is an address of dropforge in the text; `is_code`: a command to copy."""

    label: str
    text: str
    link: str = ""
    is_code: bool = False

    def __str__(self) -> str:
        return f"{self.label}: {self.text}" if self.label else self.text


class News(NamedTuple):
    """A message for every channel. `event` is the run event about the same: it has the id, the title and the link.

    `error_class` says why the run failed. `tone` is that of a notice.
    """

    event: RunEvent
    state: RunState
    lines: tuple[Line, ...]
    error_class: ErrorClass | None = None
    tone: Tone = Tone.WARNING

    @property
    def title(self) -> str:
        return self.event.title

    @property
    def link(self) -> str:
        return self.event.link

    @property
    def is_notice(self) -> bool:
        return self.event.notice is not None

    @property
    def is_end(self) -> bool:
        """Whether the message reports the end of the run."""
        return self.state.is_terminal and not self.is_notice

    def __str__(self) -> str:
        """The message as plain text."""
        return "\n".join([self.title, *map(str, self.lines), f"run: {self.event.run}", f"page: {self.link}"])


def state_news(record: Record, spec: JobSpec | None, settings: Settings, now: datetime) -> News | None:
    """The message for the present state of a record; None for a state without a message."""
    if record.state not in _TOLD and not record.state.is_terminal:
        return None
    event = state_event(record, record.state, settings, now)
    error_class = record.error.error_class if record.error else None
    return News(event, record.state, _lines(_facts(record, spec, settings, now), event), error_class)


def notice_news(record: Record, notice: Notice, settings: Settings, now: datetime) -> News:
    """The message for a notice."""
    event = notice_event(record, notice, settings, now)
    facts = [Line("why", one_line(notice.text)), Line("cost", notice.cost or cost_of(record, now))]
    return News(event, record.state, _lines(facts, event), tone=notice.tone)


def _lines(facts: list[Line], event: RunEvent) -> tuple[Line, ...]:
    """The facts that are known, and the actions, but for those that a fact names already."""
    known = [line for line in facts if line.text]
    named = "\n".join(line.text for line in known)
    actions = [Line(label, command, is_code=True) for label, command in event.actions.items() if command not in named]
    return (*known, *actions)


def _facts(record: Record, spec: JobSpec | None, settings: Settings, now: datetime) -> list[Line]:
    """Why the run is in its state, what it costs, and what else a person wants to know: the most important first."""
    origin, cost = Line("from", source_of(record)), Line("cost", cost_of(record, now))
    if record.state is RunState.ACCEPTED:
        return [origin, cost, Line("budget", one_line(short_endpoint(spec)) if spec else "")]
    if record.state is RunState.REJECTED:
        return [*_problems(record), origin, cost]
    if record.state is RunState.TRAINING:
        where = record.attempts[-1]
        return [Line("where", f"attempt {where.number} on {_machines(spec)} in {where.region}"), cost]
    spent = [cost, Line("time", _time(record, now))]
    if record.state is RunState.SUCCEEDED:
        served = _served(record.endpoint, record, spec, settings) if record.endpoint else [_unserved(spec)]
        return [Line("result", _result(record)), origin, *spent, *served]
    return [*_failure(record), origin, *spent, Line("files", _files(record, settings))]


def _problems(record: Record) -> list[Line]:
    shown = [Line(one_line(str(p["pointer"] or "/"), 120), _problem(p)) for p in record.problems[:_SHOWN_PROBLEMS]]
    hidden = len(record.problems) - len(shown)
    return [*shown, Line("", f"and {hidden} more problems" if hidden > 0 else "")]


def _problem(problem: dict[str, Any]) -> str:
    parts = [str(problem["message"])]
    parts += [f"{word} {problem[word]}" for word in ("found", "expected") if problem.get(word)]
    return one_line("; ".join(parts), MAX_LINE - 120)


def _result(record: Record) -> str:
    """The metrics that were measured before and after the training, and on how many rows."""
    metrics = record.metrics
    pairs = [(name, metrics.get(f"{name}_before"), value) for name, value in metrics.items() if value is not None]
    shown = [
        f"{one_line(name.replace('_', ' '), 40)} {_number(before)} → {_number(after)}"
        for name, before, after in pairs
        if before is not None
    ][:_SHOWN_METRICS]
    if not shown and (loss := metrics.get("train_loss")) is not None:
        shown = [f"training loss {_number(loss)}"]
    if (rows := metrics.get("rows_eval")) and shown:
        shown.append(f"{_number(rows)} held-out rows")
    return one_line(" · ".join(shown))


def _number(value: float) -> str:
    """Whole and large numbers in full, other numbers with four digits."""
    if not math.isfinite(value):
        return NOT_FINITE
    if value == round(value) or abs(value) >= 10_000:
        return f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:.4g}"


def _time(record: Record, now: datetime) -> str:
    spent = record.stage_seconds(now)
    if not spent:
        return ""
    parts = [f"{duration(sum(spent.values()))} in all"]
    if training := spent.get(RunState.TRAINING):
        parts.append(f"{duration(training)} of it training")
    return ", ".join(parts)


def _unserved(spec: JobSpec | None) -> Line:
    if spec and spec.serve and spec.serve.endpoint:
        name = spec.serve.endpoint
        return Line("endpoint", f"serves behind {name}: `dropforge snippet {name}` prints a program that calls it")
    return Line("endpoint", "none, the spec trains only" if spec and spec.serve is None else "none")


def _served(endpoint: Endpoint, record: Record, spec: JobSpec | None, settings: Settings) -> list[Line]:
    base = endpoint.base_url
    is_private = spec is not None and spec.serve is not None and spec.serve.is_private
    where = ", inside the VPC only," if is_private else ""
    text = f"{base}{where} until {endpoint.expires:%Y-%m-%d %H:%M} UTC"
    if endpoint.limit == "max_cost_usd":
        text += ", when the budget is used up"
    if record.parity is not None:
        text += f"; parity {record.parity.state}"
    call = Line("call", _call(base, record.run, endpoint, spec, settings), is_code=True)
    return [Line("endpoint", cut(text, MAX_LINE), base), call]


def _call(base: str, run: str, endpoint: Endpoint, spec: JobSpec | None, settings: Settings) -> str:
    """A shell command that asks the endpoint. It has the command that prints the token, and never the token."""
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": "Hello"}]}
    words = [f'-H "Authorization: Bearer $({token})"'] if (token := _token_command(run, spec, settings)) else []
    words += ["-H 'Content-Type: application/json'", f"-d {shlex.quote(json.dumps(body))}"]
    return cut(f"curl {shlex.quote(base + '/chat/completions')} {' '.join(words)}", MAX_LINE)


def _token_command(run: str, spec: JobSpec | None, settings: Settings) -> str:
    """The command that prints the token for an endpoint (docs/calling.md#the-token); "" without a token."""
    credential = spec.serve.credential if spec and spec.serve else "identity_token"
    secret = settings.endpoint_key_secret if credential == "api_key" else ""
    if credential != "identity_token" and not secret:
        return ""
    if settings.token_command:
        return f"{settings.token_command} {run}"
    return f"gcloud secrets versions access latest --secret={secret}" if secret else "gcloud auth print-identity-token"


def _failure(record: Record) -> list[Line]:
    """Why the run ended, and what to do: the hint of the error, or what helps against its class."""
    by = Line("by", one_line(record.ended_by))
    if (error := record.error) is None:
        return [by]
    remedy = error.hint or (_REMEDIES.get(error.error_class, _REMEDY) if record.state is RunState.FAILED else "")
    return [Line("why", one_line(error.message)), Line("do", one_line(remedy)), by]


def _files(record: Record, settings: Settings) -> str:
    """Where the model of a run is that is not served; "" without a manifest, from which its metrics are."""
    return f"gs://{settings.runs_bucket}/models/{record.run}/" if record.metrics else ""


def _machines(spec: JobSpec | None) -> str:
    """The accelerators of an attempt: `16 x nvidia-b200`."""
    if spec is None:
        return "its target"
    machines = spec.target.accelerators
    return f"{machines.count} x {machines.name}" if machines.count > 1 else machines.name
