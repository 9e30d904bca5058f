"""The places that a policy gives to runs at the same time, and its money for a day: who holds a place, and who waits.

A run holds a place from before its first attempt until its end. `Places` is one object of the runs bucket. Each change
of it is one conditional write, so two functions at once never give away the last place twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from dropforge.base.changes import evolve

from .record import Stored

_ROUNDING_USD = 1e-6  # sums of floats differ from the price on paper


class Rule(NamedTuple):
    """The limits of a policy for the runs that have these labels; None: no limit.

    `runs` may hold a place at the same time. `usd` is for all runs that get a place on the same day (UTC).
    """

    name: str  # "", or the place in the policy, such as `by_label[0].`
    labels: dict[str, str]
    runs: int | None
    usd: float | None

    @property
    def max_runs(self) -> str:
        """The name of the limit `runs` in the policy."""
        return f"{self.name}max_runs"

    @property
    def max_usd(self) -> str:
        """The name of the limit `usd` in the policy."""
        return f"{self.name}max_usd_per_day"

    @property
    def key(self) -> str:
        """The same for the same labels, wherever the policy has them."""
        return ",".join(f"{key}={value}" for key, value in sorted(self.labels.items()))

    def covers(self, labels: dict[str, str]) -> bool:
        """Whether the rule is for a run with these labels."""
        return self.labels.items() <= labels.items()


class Entry(Stored):
    """A run that waits for a place or holds one.

    `usd` is its maximum cost; 0 if the price is unknown. `day` is the day (UTC) on which the run got its place; ""
    while it waits.
    """

    run: str
    created: datetime
    labels: dict[str, str]
    usd: float
    day: str = ""


class Wait(NamedTuple):
    """The wait of a run: a rule's name in the policy, and the run's number among those that wait for this rule."""

    rule: str
    place: int


class Places(Stored):
    """Every run that holds a place or waits for one. `used` is the money of `day` by the key of a rule."""

    day: str = ""
    used: dict[str, float] = {}
    holding: list[Entry] = []
    waiting: list[Entry] = []

    @property
    def runs(self) -> set[str]:
        """Every run that holds a place or waits for one."""
        return {entry.run for entry in (*self.holding, *self.waiting)}

    def with_waiting(self, *entries: Entry) -> Places:
        """These places with runs that wait, but for those that wait already or hold a place."""
        known = self.runs
        added = [entry for entry in entries if entry.run not in known]
        return evolve(self, waiting=sorted([*self.waiting, *added], key=_order)) if added else self

    def with_holding(self, entries: Iterable[Entry]) -> Places:
        """These places with runs that were lost from this object. They hold a place, whatever the rules say."""
        lost = [entry for entry in entries if entry.run not in {held.run for held in self.holding}]
        again = {entry.run for entry in lost}
        waiting = [entry for entry in self.waiting if entry.run not in again]
        return evolve(self, holding=[*self.holding, *lost], waiting=waiting) if lost else self

    def without(self, run: str, cost: float | None, rules: Sequence[Rule]) -> Places:
        """These places without a run that has ended. The money that it did not use returns to the day of its place.

        `cost` is the most that the run costs in the end; None if that is not known.
        """
        if run not in self.runs:
            return self
        used = dict(self.used)
        for entry in self.holding:
            if entry.run == run and entry.day == self.day and cost is not None:
                for key in {rule.key for rule in _of(entry, rules)}:
                    used[key] = max(0.0, used.get(key, 0.0) - max(0.0, entry.usd - cost))
        holding = [entry for entry in self.holding if entry.run != run]
        waiting = [entry for entry in self.waiting if entry.run != run]
        return evolve(self, used=used, holding=holding, waiting=waiting)

    def given_out(self, rules: Sequence[Rule], today: str) -> tuple[Places, dict[str, Wait]]:
        """These places after every free place of today was given to a run, and what each other run still waits for.

        Runs get places in the order of their submission. Earlier runs do not delay a run for which every rule has room.
        """
        day = max(self.day, today)  # a function whose clock is slow must not begin a day again
        used = dict(self.used) if day == self.day else {}
        holding, waiting, waits = list(self.holding), list[Entry](), dict[str, Wait]()
        room = _Room(rules, holding, used)
        for entry in self.waiting:
            if wait := room.wait_of(entry):
                waiting.append(entry)
                waits[entry.run] = wait
            else:
                holding.append(evolve(entry, day=day))
                used.update({rule.key: used.get(rule.key, 0.0) + entry.usd for rule in _of(entry, rules)})
        return Places(day=day, used=used, holding=holding, waiting=waiting), waits


class _Room:
    """The rest of each rule while places are given out, by its key, and the number of waiting runs of each limit."""

    def __init__(self, rules: Sequence[Rule], holding: Iterable[Entry], used: dict[str, float]) -> None:
        self.rules = rules
        self.held = Counter(key for entry in holding for key in {rule.key for rule in _of(entry, rules)})
        self.usd = defaultdict(float, used)
        self.waiting = Counter[str]()

    def wait_of(self, entry: Entry) -> Wait | None:
        """The wait of the next run. None if the rules have room for the run; the method then takes that room.

        The first run that waits for places of a rule keeps its money, and its places in rules that do not cover all
        runs of the first rule: otherwise later runs could overtake it again and again. A run that waits for money keeps
        nothing: the next day begins with it.
        """
        mine = _of(entry, self.rules)
        poor = [rule for rule in mine if self._is_short(rule, entry)]
        crowded = [rule for rule in mine if rule.runs is not None and self.held[rule.key] >= rule.runs]
        limits = [rule.max_runs for rule in crowded] + [rule.max_usd for rule in poor]
        if not poor and not any(self.waiting[limit] for limit in limits):
            places = [rule for rule in mine if not crowded or not all(rule.covers(full.labels) for full in crowded)]
            self.held.update({rule.key for rule in places})
            for key in {rule.key for rule in mine}:
                self.usd[key] += entry.usd
        self.waiting.update(limits)
        return Wait(limits[0], self.waiting[limits[0]]) if limits else None

    def _is_short(self, rule: Rule, entry: Entry) -> bool:
        """Whether the day's money does not pay for a run. Any run may begin a day: submit has refused dearer runs."""
        spent = self.usd[rule.key]
        return rule.usd is not None and spent > 0 and spent + entry.usd > rule.usd + _ROUNDING_USD


def _order(entry: Entry) -> tuple[datetime, str]:
    return entry.created, entry.run


def _of(entry: Entry, rules: Sequence[Rule]) -> list[Rule]:
    return [rule for rule in rules if rule.covers(entry.labels)]
