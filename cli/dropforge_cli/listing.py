"""The list of runs: which runs it has, in which order, and which columns fit the terminal."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from rich.cells import cell_len
from rich.table import Table

from dropforge.base.errors import Malformed, NotFound
from dropforge.base.figures import age, number, usd
from dropforge.run.record import Record
from dropforge.run.store import RunStore
from dropforge.spec import JobSpec

from .display import counted, table
from .plain import plain
from .problems import CliError

READERS = 16  # parallel requests; each record or spec is one request
GAP = 2  # blank columns between two columns
FIELDS = ("created", "cost", "name")  # what runs are sorted by; any other word is a metric

Specs = dict[str, JobSpec | None]


def read_specs(store: RunStore, records: Sequence[Record]) -> Specs:
    """Return each run's spec; None for a rejected run, and for a spec that this version cannot read."""

    def read(record: Record) -> JobSpec | None:
        try:
            return store.spec(record.run)
        except (NotFound, Malformed):
            return None

    with ThreadPoolExecutor(READERS) as pool:
        specs = counted(pool.map(read, records), len(records), "reading specs")
        return dict(zip((record.run for record in records), specs, strict=True))


@dataclass(frozen=True)
class Filter:
    """The conditions that a listed run meets. An empty field excludes no run."""

    states: tuple[str, ...] = ()
    name: str | None = None
    since: datetime | None = None
    target: str | None = None
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def needs_specs(self) -> bool:
        return bool(self.target or self.labels)

    def takes(self, record: Record) -> bool:
        """Whether a run passes what its record decides. `*` in a name stands for any text."""
        return (
            (not self.states or record.state in self.states)
            and (self.name is None or fnmatch.fnmatchcase(record.name, self.name))
            and (self.since is None or record.created >= self.since)
        )

    def takes_spec(self, spec: JobSpec | None) -> bool:
        """Whether a run passes what its spec decides. A run without a spec has no target and no label."""
        if spec is None:
            return not self.needs_specs
        return (self.target is None or spec.target.type == self.target) and all(
            spec.labels.get(key) == value for key, value in self.labels
        )


def in_order(records: Iterable[Record], by: str, now: datetime, *, backwards: bool = False) -> list[Record]:
    """Return the runs, newest first, dearest first, by name, or with the highest metric first.

    A run with an unknown cost, or without the metric, is last in both directions. Raises CliError for a metric of no
    run.
    """
    runs = sorted(records, key=lambda record: record.created, reverse=True)
    if by == "created":
        return runs[::-1] if backwards else runs
    if by == "name":
        return sorted(runs, key=lambda record: record.name, reverse=backwards)
    values = {run.run: run.cost(now) if by == "cost" else run.metrics.get(by) for run in runs}
    known = [run for run in runs if values[run.run] is not None]
    if runs and not known and by != "cost":
        metrics = sorted({name for run in runs for name in run.metrics})
        hint = f"sort by {', '.join(FIELDS)}" + (f", or by a metric: {', '.join(metrics)}" if metrics else "")
        raise CliError(f"none of the {len(runs)} runs has the metric {by!r}", hint)
    known.sort(key=lambda run: values[run.run] or 0.0, reverse=not backwards)
    return known + [run for run in runs if values[run.run] is None]


class Column(NamedTuple):
    """A column of the list. `rank` says which columns stay in a narrow terminal: the lowest."""

    rank: int
    title: str
    cell: Callable[[Record], str]
    is_number: bool = False


def columns(records: Sequence[Record], specs: Specs, metric: str | None, now: datetime) -> list[Column]:
    """Return every column, in the order of the list. `metric` names the metric of every run; None: of its gate."""
    shown = {record.run: metric or _metric(record, specs.get(record.run)) for record in records}
    names = {name for name in shown.values() if name}
    title = names.pop() if len(names) == 1 else "metric"

    def measured(record: Record) -> str:
        name = shown[record.run]
        value = record.metrics.get(name) if name else None
        return "-" if value is None else number(value) if title == name else f"{name} {number(value)}"

    def target(record: Record) -> str:
        spec = specs.get(record.run)
        return spec.target.type if spec else "-"

    return [
        Column(0, "run", lambda record: record.run),
        Column(6, "name", lambda record: record.name),
        Column(1, "state", _state),
        Column(4, "target", target),
        Column(8, "attempts", lambda record: str(record.attempt or "-"), is_number=True),
        Column(5, title, measured, is_number=True),
        Column(7, "endpoint", lambda record: _endpoint(record, now)),
        Column(2, "cost", lambda record: usd(record.cost(now)), is_number=True),
        Column(3, "age", lambda record: age((now - record.created).total_seconds()), is_number=True),
    ]


def fitting(records: Sequence[Record], available: Sequence[Column], width: int) -> Table:
    """Return a table with one line for each run: of the columns, those that fit into `width`. A run id stays whole."""
    cells = {column: [plain(column.cell(record)).replace("\n", " ") for record in records] for column in available}
    kept: set[Column] = set()
    used = -GAP
    for column in sorted(available):
        needed = GAP + max(map(cell_len, [column.title, *cells[column]]))
        if not kept or used + needed <= width:
            kept.add(column)
            used += needed
    chosen = [column for column in available if column in kept]
    rows = table(*(c.title for c in chosen), right=tuple(c.title for c in chosen if c.is_number))
    for row in zip(*(cells[column] for column in chosen), strict=True):
        rows.add_row(*row)
    return rows


def _state(record: Record) -> str:
    return f"{record.state}, place {record.queued.place}" if record.queued else record.state


def _metric(record: Record, spec: JobSpec | None) -> str | None:
    """The metric that says most about a run: that of its gate, or else of the usual ones the first it has."""
    gate = spec.evaluation.gate if spec and spec.evaluation else None
    usual = [*([gate.metric] if gate else []), "exact_match", "loss"]
    return next((name for name in usual if record.metrics.get(name) is not None), None)


def _endpoint(record: Record, now: datetime) -> str:
    if record.endpoint is None:
        return "-"
    left = (record.endpoint.expires - now).total_seconds()
    return "ended" if record.endpoint.ended else f"{age(left)} left" if left > 0 else "expired"
