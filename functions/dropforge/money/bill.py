"""The cost of runs, their endpoints and named endpoints, added up by month, target, model or label.

A named endpoint counts for the runs whose models it serves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from dropforge.base.figures import usd
from dropforge.endpoints.record import EndpointRecord
from dropforge.run.summary import Summary

NONE = "-"  # the group of runs without the label, or without a spec that this version reads
LABEL = "label:"

BY: dict[str, Callable[[Summary], str]] = {
    "month": lambda run: f"{run.created:%Y-%m}",
    "target": lambda run: run.target or NONE,
    "model": lambda run: run.model or NONE,
}


Named = Mapping[str, float | None]  # what named endpoints have cost at most in US dollars, by run; None: unknown
NO_NAMED: Named = {}


@dataclass(frozen=True)
class Sum:
    """The known US dollars, and the number of runs whose amount is unknown. An unknown amount never counts as 0."""

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
    """The sums of some runs. `most` is the maximum that `dropforge plan` named at the acceptance."""

    name: str
    runs: int
    training: Sum
    endpoints: Sum
    total: Sum
    most: Sum

    @classmethod
    def of(cls, name: str, runs: list[Summary], now: datetime, named: Named = NO_NAMED) -> Group:
        training = Sum.of(run.training_cost(now) for run in runs)
        served = [_added(run.serving_cost(now), named.get(run.run, 0.0)) for run in runs]
        endpoints = Sum.of(served)
        unknown = sum(run.cost(now) is None or cost is None for run, cost in zip(runs, served, strict=True))
        total = Sum(round(training.known + endpoints.known, 6), unknown)
        most = Sum.of(run.about.most_usd if run.about else None for run in runs)
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


def named_costs(endpoints: Iterable[EndpointRecord], now: datetime) -> Named:
    """The most that named endpoints have cost, by the run whose model they serve."""
    costs: dict[str, float | None] = {}
    for revision in (revision for record in endpoints for revision in record.revisions):
        for run in [adapter.run for adapter in revision.adapters] or [revision.run]:
            costs[run] = _added(costs.get(run, 0.0), revision.cost_each(now))
    return costs


def _added(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second


def grouped(runs: list[Summary], by: str, now: datetime, named: Named = NO_NAMED) -> list[Group]:
    """Return the groups: months in their order, other groups with the dearest first."""
    members: dict[str, list[Summary]] = defaultdict(list)
    for run in runs:
        name = run.labels.get(by.removeprefix(LABEL), NONE) if by.startswith(LABEL) else BY[by](run)
        members[name].append(run)
    groups = [Group.of(name, members[name], now, named) for name in sorted(members)]
    return groups if by == "month" else sorted(groups, key=lambda group: -group.total.known)
