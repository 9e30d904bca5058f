"""What runs and their endpoints have cost, added up by month, target, model or label."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from .base.figures import usd
from .money import most_usd
from .run.record import Record
from .spec import JobSpec

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


def _label(run: Priced, key: str) -> str:
    return run.spec.labels.get(key, NONE) if run.spec else NONE
