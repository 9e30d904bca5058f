"""`dropforge cost`: what runs and their endpoints have cost, by group, beside what they could have cost at most."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import click

from dropforge.base.clock import utc_now
from dropforge.base.figures import usd
from dropforge.money import most_usd
from dropforge.run.record import Record, RunState
from dropforge.spec import JobSpec

from .deployment import connect
from .display import stderr, stdout, table
from .listing import read_specs
from .options import json_option, since_option, state_option
from .plain import echo, echo_json
from .runs import all_runs

NONE = "-"  # the group of runs without the label, or without a spec that this version reads
LABEL = "label:"


class Priced(NamedTuple):
    """A run with its spec; None if this version cannot read the spec."""

    record: Record
    spec: JobSpec | None


BY: dict[str, Callable[[Priced], str]] = {
    "month": lambda run: f"{run.record.created:%Y-%m}",
    "target": lambda run: run.spec.target.type if run.spec else NONE,
    "model": lambda run: run.spec.model.source if run.spec else NONE,
}


@dataclass(frozen=True)
class Sum:
    """US dollars that are known, and of how many runs the amount is unknown. An unknown amount never counts as 0."""

    known: float
    unknown: int

    @classmethod
    def of(cls, amounts: Iterable[float | None]) -> Sum:
        listed = list(amounts)
        known = [amount for amount in listed if amount is not None]
        return cls(round(sum(known), 6), len(listed) - len(known))

    @property
    def usd(self) -> float | None:
        """The sum of the known amounts; None if every amount is unknown."""
        return None if self.unknown and not self.known else self.known

    def __str__(self) -> str:
        more = f" + {self.unknown} unknown" if self.unknown and self.known else ""
        return usd(self.usd) + more


@dataclass(frozen=True)
class Group:
    """The sums of some runs. `most` is the maximum that `dropforge plan` names, at today's prices."""

    name: str
    runs: int
    training: Sum
    endpoints: Sum
    total: Sum
    most: Sum

    @classmethod
    def of(cls, name: str, runs: list[Priced], now: datetime) -> Group:
        training = Sum.of(run.record.training_cost(now) for run in runs)
        endpoints = Sum.of(run.record.serving_cost(now) for run in runs)
        unknown = sum(run.record.cost(now) is None for run in runs)
        total = Sum(round(training.known + endpoints.known, 6), unknown)
        most = Sum.of(most_usd(run.spec) if run.spec else None for run in runs)
        return cls(name, len(runs), training, endpoints, total, most)

    @property
    def share(self) -> float | None:
        """The total as a share of the maximum; None if a part of either is unknown."""
        if self.total.unknown or self.most.unknown or not self.most.known:
            return None
        return round(self.total.known / self.most.known, 4)

    def row(self) -> list[str]:
        share = "-" if self.share is None else f"{self.share:.0%}"
        return [self.name, str(self.runs), *map(str, (self.training, self.endpoints, self.total, self.most)), share]

    def to_json(self) -> dict[str, str | int | float | None]:
        sums = {"training": self.training, "endpoints": self.endpoints, "total": self.total, "maximum": self.most}
        values: dict[str, str | int | float | None] = {"group": self.name, "runs": self.runs}
        for name, amount in sums.items():
            values |= {f"{name}_usd": amount.usd, f"{name}_unknown_runs": amount.unknown}
        return {**values, "share_of_maximum": self.share}


class By(click.ParamType[str]):
    """What runs are grouped by: a key of BY, or `label:KEY`."""

    name = "group"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in BY and (not value.startswith(LABEL) or value == LABEL):
            self.fail(f"{value!r}; expected {', '.join(BY)} or {LABEL}KEY, such as {LABEL}team", param, ctx)
        return value


@click.command()
@click.option("--by", type=By(), default="month", metavar="GROUP", help="month (default), target, model, or label:KEY.")
@since_option
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@state_option
def cost(by: str, since: datetime | None, as_json: bool, as_csv: bool, state: str | None) -> None:
    """Add up what runs and endpoints have cost so far, beside their maximum."""
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other")
    store, now = connect(state).store, utc_now()
    accepted = [record for record in all_runs(store) if record.state is not RunState.REJECTED]
    records = [record for record in accepted if since is None or record.created >= since]
    specs = read_specs(store, records)
    runs = [Priced(record, specs[record.run]) for record in records]
    groups, total = grouped(runs, by, now), Group.of("in all", runs, now)
    if as_json:
        echo_json({"by": by, "groups": [group.to_json() for group in groups], "total": total.to_json()})
    elif as_csv:
        echo(as_table_of_values(groups), nl=False)
    elif not runs:
        stdout().print("no runs, so no cost")
    else:
        show(groups, total, by, sum(is_open(record, now) for record in records))


def grouped(runs: list[Priced], by: str, now: datetime) -> list[Group]:
    """Return the groups: months in their order, other groups with the dearest first."""
    members: dict[str, list[Priced]] = defaultdict(list)
    for run in runs:
        members[_label(run, by.removeprefix(LABEL)) if by.startswith(LABEL) else BY[by](run)].append(run)
    groups = [Group.of(name, members[name], now) for name in sorted(members)]
    return groups if by == "month" else sorted(groups, key=lambda group: -group.total.known)


def is_open(record: Record, now: datetime) -> bool:
    """Whether a run or its endpoint may still cost something."""
    serves = record.endpoint is not None and not record.endpoint.ended and now < record.endpoint.expires
    return serves or not record.state.is_terminal


def show(groups: list[Group], total: Group, by: str, still_open: int) -> None:
    """Print the groups for people."""
    columns = (by.removeprefix(LABEL), "runs", "training", "endpoints", "total", "maximum", "share")
    rows = table(*columns, right=columns[1:])
    for group in [*groups, total]:
        rows.add_row(*group.row())
    stdout().print(rows)
    if still_open:
        stderr().print(f"so far: runs that have not ended, or still serve: {still_open}", style="dim")


def as_table_of_values(groups: list[Group]) -> str:
    """Return the groups as comma-separated values with a header. An unknown amount is empty."""
    text = io.StringIO()
    rows = [group.to_json() for group in groups]
    writer = csv.DictWriter(text, fieldnames=list(Group.of("", [], utc_now()).to_json()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _label(run: Priced, key: str) -> str:
    return run.spec.labels.get(key, NONE) if run.spec else NONE
