"""The list of runs: which runs it has, in which order, and which columns fit the terminal."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from dropforge.base.figures import age, number, usd
from dropforge.run.summary import Summary

from .display import Column
from .problems import CliError

FIELDS = ("created", "cost", "name")  # what runs are sorted by; any other word is a metric


@dataclass(frozen=True)
class Filter:
    """The conditions that a listed run meets. An empty field excludes no run."""

    states: tuple[str, ...] = ()
    name: str | None = None
    since: datetime | None = None
    target: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    model: str | None = None

    def takes(self, run: Summary) -> bool:
        """Whether a run meets the conditions. `*` in a name or a model stands for any text.

        A run without a spec has no target, no model and no label.
        """
        return (
            (not self.states or run.state in self.states)
            and (self.name is None or fnmatch.fnmatchcase(run.name, self.name))
            and (self.since is None or run.created >= self.since)
            and (self.target is None or run.target == self.target)
            and (self.model is None or fnmatch.fnmatchcase(run.model or "", self.model))
            and all(run.labels.get(key) == value for key, value in self.labels)
        )


def in_order(summaries: Iterable[Summary], by: str, now: datetime, *, backwards: bool = False) -> list[Summary]:
    """Return the runs, newest first, dearest first, by name, or with the highest metric first.

    A run with an unknown cost, or without the metric, is last in both directions. Raises CliError for a metric of no
    run.
    """
    runs = sorted(summaries, key=lambda run: run.created, reverse=True)
    if by == "created":
        return runs[::-1] if backwards else runs
    if by == "name":
        return sorted(runs, key=lambda run: run.name, reverse=backwards)
    values = {run.run: run.cost(now) if by == "cost" else run.metrics.get(by) for run in runs}
    known = [run for run in runs if values[run.run] is not None]
    if runs and not known and by != "cost":
        metrics = sorted({name for run in runs for name in run.metrics})
        hint = f"sort by {', '.join(FIELDS)}" + (f", or by a metric: {', '.join(metrics)}" if metrics else "")
        raise CliError(f"none of the {len(runs)} runs has the metric {by!r}", hint)
    known.sort(key=lambda run: values[run.run] or 0.0, reverse=not backwards)
    return known + [run for run in runs if values[run.run] is None]


def columns(runs: Sequence[Summary], metric: str | None, now: datetime) -> list[Column]:
    """Return every column, in the order of the list. `metric` names the metric of every run; None: of its gate."""
    shown = {run.run: metric or _metric(run) for run in runs}
    names = {name for name in shown.values() if name}
    title = names.pop() if len(names) == 1 else "metric"

    def measured(run: Summary) -> str:
        name = shown[run.run]
        value = run.metrics.get(name) if name else None
        return "-" if value is None else number(value) if title == name else f"{name} {number(value)}"

    return [
        Column(0, "run", lambda run: run.run),
        Column(6, "name", lambda run: run.name),
        Column(1, "state", _state),
        Column(7, "target", lambda run: run.target or "-"),
        Column(9, "labels", _labels),
        Column(8, "attempts", lambda run: str(run.attempt or "-"), is_number=True),
        Column(5, title, measured, is_number=True),
        Column(4, "endpoint", lambda run: _endpoint(run, now)),
        Column(2, "cost", lambda run: usd(run.cost(now)), is_number=True),
        Column(3, "age", lambda run: age((now - run.created).total_seconds()), is_number=True),
    ]


def _state(run: Summary) -> str:
    return f"{run.state}, place {run.place}" if run.place is not None else run.state


def _labels(run: Summary) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(run.labels.items())) or "-"


def _metric(run: Summary) -> str | None:
    """The metric that says most about a run: that of its gate, or else of the usual ones the first it has."""
    usual = [run.about.metric if run.about else "", "exact_match", "loss"]
    return next((name for name in usual if run.metrics.get(name) is not None), None)


def _endpoint(run: Summary, now: datetime) -> str:
    if run.endpoint is None:
        return "-"
    left = (run.endpoint.expires - now).total_seconds()
    return "ended" if run.endpoint.ended else f"{age(left)} left" if left > 0 else "expired"
