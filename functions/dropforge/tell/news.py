"""What a message to people says, before a channel gives it its form: a title and a few lines.

Each line is a single line, is at most MAX_LINE characters long, and has no credentials. Title, lines and the channel's
line with the ids have at most MAX_LINES lines together.
"""

from __future__ import annotations

import json
import math
import shlex
from datetime import datetime
from typing import Any, NamedTuple

from dropforge.base.errors import ErrorClass
from dropforge.base.figures import NOT_FINITE
from dropforge.base.redact import cut, redact
from dropforge.base.settings import Settings
from dropforge.money import short_endpoint
from dropforge.run.events import RunEvent
from dropforge.run.record import Endpoint, Notice, Record, RunState, Tone
from dropforge.spec import JobSpec

from .run_events import notice_event, state_event

MAX_LINES, MAX_LINE, MAX_TITLE = 10, 500, 140
_SHOWN_PROBLEMS, _SHOWN_METRICS = 5, 4
_HEADLINES = {
    RunState.ACCEPTED: "accepted",
    RunState.REJECTED: "rejected",
    RunState.TRAINING: "training started",
    RunState.SUCCEEDED: "succeeded",
    RunState.FAILED: "failed",
    RunState.CANCELLED: "cancelled",
}
_NEXT = {
    ErrorClass.QUOTA: "raise the quota or add placements, then submit the spec again",
    ErrorClass.STOCKOUT: "add placements in other regions, then submit the spec again",
    ErrorClass.GATE: "train with other data or settings, or change the gate; the model is kept, but not served",
    ErrorClass.PARITY: "see docs/serving.md#parity; the model is kept, but not served",
    ErrorClass.DEADLINE: "raise limits.max_duration, then submit the spec again",
    ErrorClass.BUDGET: "raise limits.max_cost_usd, then submit the spec again",
    ErrorClass.OUT_OF_MEMORY: "reduce max_length or the batch, or choose a larger accelerator, then submit again",
}
_NEXT_ELSE = "correct the cause, then submit the spec again; docs/operations.md#error-classes explains each class"


class Line(NamedTuple):
    """A line of a message. `link` is an address of dropforge in the text; `is_code`: a command to copy."""

    label: str
    text: str
    link: str = ""
    is_code: bool = False

    def __str__(self) -> str:
        return f"{self.label}: {self.text}" if self.label else self.text


class News(NamedTuple):
    """A message for every channel. `event` is the run event about the same; its id is the id of the message.

    `link` is the page of the run in the console, or "". `error_class` says why the run failed. `tone` is that of a
    notice.
    """

    event: RunEvent
    state: RunState
    title: str
    lines: tuple[Line, ...]
    link: str = ""
    error_class: ErrorClass | None = None
    tone: Tone = Tone.WARNING

    @property
    def is_notice(self) -> bool:
        return self.event.notice is not None

    @property
    def is_end(self) -> bool:
        """Whether the message reports the end of the run."""
        return self.state.is_terminal and not self.is_notice


def state_news(record: Record, spec: JobSpec | None, settings: Settings, now: datetime) -> News | None:
    """The message for the present state of a record; None for a state without a message."""
    headline = _HEADLINES.get(record.state)
    if headline is None:
        return None
    lines = tuple(line for line in _lines(record, spec, settings, now) if line.text)
    event, title = state_event(record, record.state, settings, now), _title(record, headline)
    error_class = record.error.error_class if record.error else None
    return News(event, record.state, title, lines, settings.page_of(record.run), error_class)


def notice_news(record: Record, notice: Notice, settings: Settings, now: datetime) -> News:
    """The message for a notice."""
    lines = (Line("", one_line(notice.text)),)
    event, title = notice_event(record, notice, settings, now), _title(record, notice.headline)
    return News(event, record.state, title, lines, settings.page_of(record.run), tone=notice.tone)


def one_line(text: str, limit: int = MAX_LINE) -> str:
    """A foreign text in one line, without credentials, control characters and marks that reorder a text."""
    shown = "".join(c if c.isprintable() else " " for c in redact(text))
    return cut(" ".join(shown.split()), limit)


def _title(record: Record, headline: str) -> str:
    return one_line(f"{record.name or record.run} {headline}", MAX_TITLE)


def _lines(record: Record, spec: JobSpec | None, settings: Settings, now: datetime) -> list[Line]:
    if record.state is RunState.ACCEPTED:
        budget = Line("budget", one_line(short_endpoint(spec)) if spec else "")
        return [Line("from", one_line(f"{record.submitter} {record.source}".strip())), budget, _more(record, settings)]
    if record.state is RunState.REJECTED:
        return [*_problems(record), Line("details", f"gs://{settings.runs_bucket}/runs/{record.run}/errors.json")]
    if record.state is RunState.TRAINING:
        where = record.attempts[-1]
        text = f"attempt {where.number} on {_machines(spec)} in {where.region}"
        return [Line("where", text), _more(record, settings)]
    money = [Line("cost", _cost(record, now)), Line("time", _time(record, now))]
    if record.state is RunState.SUCCEEDED:
        served = _served(record.endpoint, record, spec, settings) if record.endpoint else [_unserved(spec)]
        return [Line("result", _result(record)), *money, *served, _more(record, settings)]
    return [*_failure(record, settings), *money, _more(record, settings)]


def _more(record: Record, settings: Settings) -> Line:
    """Where the run and its log are shown."""
    page = settings.page_of(record.run)
    return Line("more", f"{page} or `dropforge logs {record.run}`" if page else f"dropforge logs {record.run}", page)


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


def _cost(record: Record, now: datetime) -> str:
    training = record.training_cost(now)
    parts = ["training: price unknown" if training is None else f"training ${training:,.2f}"]
    if (endpoint := record.endpoint) is not None:
        cost = record.serving_cost(endpoint.expires)
        price = "price unknown" if cost is None else f"at most ${cost:,.2f}"
        parts.append(f"endpoint {price} until it ends at {endpoint.expires:%Y-%m-%d %H:%M} UTC")
    return ", ".join(parts)


def _time(record: Record, now: datetime) -> str:
    spent = record.stage_seconds(now)
    if not spent:
        return ""
    parts = [f"{_minutes(sum(spent.values()))} in all"]
    if training := spent.get(RunState.TRAINING):
        parts.append(f"{_minutes(training)} of it training")
    return ", ".join(parts)


def _minutes(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


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


def _failure(record: Record, settings: Settings) -> list[Line]:
    by = Line("by", one_line(record.ended_by))
    if (error := record.error) is None:
        return [by]
    lines = [Line(error.error_class, one_line(error.message)), Line("hint", one_line(error.hint))]
    if record.state is RunState.FAILED:
        lines.append(Line("next", _NEXT.get(error.error_class, _NEXT_ELSE)))
    return [*lines, by, Line("files", f"gs://{settings.runs_bucket}/models/{record.run}/" if record.attempts else "")]


def _machines(spec: JobSpec | None) -> str:
    """The accelerators of an attempt: `16 x nvidia-b200`."""
    if spec is None:
        return "its target"
    machines = spec.target.accelerators
    return f"{machines.count} x {machines.name}" if machines.count > 1 else machines.name
