"""`dropforge trace`: when each part of a run began and how long it took, as bars or as OTLP's JSON."""

from __future__ import annotations

from datetime import datetime

import click
from rich.console import Console
from rich.text import Text

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.base.figures import duration
from dropforge.run.record import Record
from dropforge.run.spans import Span, in_order
from dropforge.tell.otlp import document_of, read_spans

from .deployment import connect
from .display import stdout, table, titled, working
from .options import json_option, latest_argument, state_option
from .plain import echo_json
from .runs import find_run

WIDEST = 100  # columns of a timeline: a bar in a file need not be longer
LABEL_WIDTH = 26


@click.command()
@latest_argument
@json_option
@state_option
def trace(run: str, as_json: bool, state: str | None) -> None:
    """Show when each part of a run began and how long it took.

    RUN is its id, the beginning of its id, a name (the newest run of that name), or `latest`, the default. --json
    prints the trace in OTLP's JSON, as a receiver of OpenTelemetry gets it.
    """
    deployment = connect(state)
    record = find_run(deployment, run)
    with working("reading the trace"):
        spans = read_spans(deployment.context, record)
    if as_json:
        echo_json(document_of(record.run, spans, deployment.settings))
    else:
        show(record, spans, utc_now(), stdout())


def show(record: Record, spans: list[Span], now: datetime, out: Console) -> None:
    """Print the timeline of a run for people."""
    root = spans[0]
    ended = root.ended or now
    out.print(titled(record.run, f"{record.name}  {record.state}  {duration(root.seconds(now))}"))
    out.print(f"trace {names.trace_id(record.run)}, from {root.began:%Y-%m-%d %H:%M:%S} UTC")
    rows = table("", "after", "lasted", "", right=("after", "lasted"))
    rows.show_header = False
    width = max(10, min(out.width, WIDEST) - LABEL_WIDTH - 26)
    for span in in_order(spans):
        after = duration((span.began - root.began).total_seconds())
        lasted = duration(span.seconds(now)) + ("" if span.ended else " +")
        style = "red" if span.problem else "green" if span.ended else "cyan"
        rows.add_row(_label(span), after, lasted, Text(_bar(span, root.began, ended, now, width), style))
    out.print(rows)
    for span in spans:
        if span.problem:
            out.print(f"{_label(span).strip()}: {span.error_type}: {span.problem}", style="red", soft_wrap=True)


def _label(span: Span) -> str:
    """The name of a span below the name of the span that it is in."""
    label = f"{'  ' * span.depth}{span.label}"
    return label[:LABEL_WIDTH]


def _bar(span: Span, began: datetime, ended: datetime, now: datetime, width: int) -> str:
    """The bar of a span on the line from `began` to `ended`; `>` says that the span lasts longer than the line."""
    whole = max((ended - began).total_seconds(), 1e-6)

    def column(time: datetime) -> int:
        return round(width * min(max((time - began).total_seconds() / whole, 0.0), 1.0))

    until = span.ended or now
    first = min(column(span.began), width - 1)
    bar = "━" * max(1, column(until) - first)
    return " " * first + (bar[:-1] + ">" if until > ended or span.ended is None else bar)
