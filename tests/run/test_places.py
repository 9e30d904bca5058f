"""Who gets a place: limits, order, labels, money for a day. The property tests try random policies and random runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropforge.run.places import Entry, Places, Rule

BEGAN = datetime(2026, 11, 23, tzinfo=UTC)
TODAY, TOMORROW = "2026-11-23", "2026-11-24"
ALL: dict[str, str] = {}
TEAM = {"team": "search"}


def entry(number: int, usd: float = 1.0, **labels: str) -> Entry:
    """The run that was submitted as the `number`-th."""
    return Entry(run=f"job-{number:012x}", created=BEGAN + timedelta(seconds=number), labels=labels, usd=usd)


def holders(places: Places) -> list[int]:
    return [int(held.run.removeprefix("job-"), 16) for held in places.holding]


class Deployment:
    """The places of a deployment with these rules."""

    def __init__(self, *rules: Rule, today: str = TODAY) -> None:
        self.rules, self.today, self.places = rules, today, Places()
        self.waits: dict[int, tuple[str, int]] = {}

    def come(self, *entries: Entry) -> list[int]:
        """Runs ask for a place one after the other; return who holds one then."""
        for new in entries:
            self._change(self.places.with_waiting(new))
        return holders(self.places)

    def end(self, number: int, cost: float | None = 0.0) -> list[int]:
        self._change(self.places.without(entry(number).run, cost, self.rules))
        return holders(self.places)

    def look(self, today: str) -> list[int]:
        self.today = today
        self._change(self.places)
        return holders(self.places)

    def _change(self, places: Places) -> None:
        self.places, waits = places.given_out(self.rules, self.today)
        self.waits = {int(run.removeprefix("job-"), 16): (wait.rule, wait.place) for run, wait in waits.items()}
        assert Places.model_validate_json(self.places.model_dump_json()) == self.places


def test_runs_over_the_limit_wait_in_the_order_of_their_submission() -> None:
    deployment = Deployment(Rule("", ALL, 2, None))
    assert deployment.come(entry(1), entry(2), entry(4), entry(3)) == [1, 2]
    assert deployment.waits == {3: ("max_runs", 1), 4: ("max_runs", 2)}
    assert deployment.end(1) == [2, 3]
    assert deployment.waits == {4: ("max_runs", 1)}
    assert deployment.come(entry(4), entry(3)) == [2, 3], "asking again changes nothing"
    assert deployment.end(4) == [2, 3], "a run may also give up while it waits"
    assert deployment.end(2) == [3]


def test_a_label_limits_only_its_runs() -> None:
    deployment = Deployment(Rule("", ALL, 3, None), Rule("by_label[0].", TEAM, 1, None))
    assert deployment.come(*(entry(n, 1.0, **TEAM) for n in (1, 2, 3)), entry(4)) == [1, 4]
    assert deployment.waits == {2: ("by_label[0].max_runs", 1), 3: ("by_label[0].max_runs", 2)}
    assert deployment.come(entry(5), entry(6)) == [1, 4, 5]
    assert deployment.end(1) == [4, 5, 2]
    assert deployment.waits == {3: ("max_runs", 1), 6: ("max_runs", 2)}


def test_a_label_with_many_waiting_runs_takes_no_places_from_others() -> None:
    deployment = Deployment(Rule("", ALL, 10, None), Rule("by_label[0].", TEAM, 1, None))
    deployment.come(*(entry(n, 1.0, **TEAM) for n in range(1, 101)))
    assert deployment.come(*(entry(n) for n in range(101, 120))) == [1, *range(101, 110)]


def test_money_is_given_by_the_day() -> None:
    deployment = Deployment(Rule("", ALL, None, 100.0))
    assert deployment.come(entry(1, 60), entry(2, 60), entry(3, 40)) == [1, 3]
    assert deployment.waits == {2: ("max_usd_per_day", 1)}
    deployment.end(1, cost=60)
    assert deployment.look(TODAY) == [3]
    assert deployment.look(TOMORROW) == [3, 2]
    assert deployment.come(entry(4, 40), entry(5, 0.01)) == [3, 2, 4]
    assert deployment.look(TODAY) == [3, 2, 4], "a function with a slow clock does not begin yesterday again"
    assert deployment.places.day == TOMORROW


def test_money_that_a_run_did_not_use_returns_to_its_day() -> None:
    deployment = Deployment(Rule("", ALL, None, 100.0), Rule("by_label[0].", TEAM, None, 90.0))
    assert deployment.come(entry(1, 80, **TEAM), entry(2, 50, **TEAM)) == [1]
    assert deployment.end(1, cost=None) == [], "an unknown cost returns nothing"
    deployment = Deployment(*deployment.rules)
    deployment.come(entry(1, 80, **TEAM), entry(2, 50, **TEAM))
    assert deployment.end(1, cost=10) == [2]
    assert deployment.places.used == {"": 60.0, "team=search": 60.0}
    deployment.look(TOMORROW)
    deployment.end(2, cost=0)
    assert deployment.places.used == {}, "the money of yesterday does not return today"


def test_a_run_that_costs_more_than_a_day_begins_a_day() -> None:
    """Submit refuses such a run; the operator may have lowered the limit since."""
    deployment = Deployment(Rule("", ALL, None, 10.0))
    assert deployment.come(entry(1, 50), entry(2, 1)) == [1]
    assert deployment.look(TOMORROW) == [1, 2]


def test_a_place_is_not_kept_free_for_a_run_that_waits_for_money() -> None:
    deployment = Deployment(Rule("", ALL, 1, 100.0))
    assert deployment.come(entry(1, 90)) == [1]
    deployment.come(entry(2, 90), entry(3, 5))
    assert deployment.waits == {2: ("max_runs", 1), 3: ("max_runs", 2)}
    assert deployment.end(1, cost=90) == [3]
    assert deployment.look(TOMORROW) == [3]
    assert deployment.end(3, cost=5) == [2]


def test_runs_that_lost_their_place_in_the_object_get_it_again_even_above_the_limit() -> None:
    places = Places(holding=[entry(1)], waiting=[entry(2), entry(3)])
    again = places.with_holding([entry(1), entry(2)])
    assert holders(again) == [1, 2]
    assert [waiting.run for waiting in again.waiting] == [entry(3).run]
    assert places.with_holding([entry(1)]) is places


LABELS = st.fixed_dictionaries({}, optional={key: st.sampled_from("xy") for key in ("a", "b")})
RULES = st.lists(
    st.builds(Rule, st.just("r."), LABELS, st.none() | st.integers(1, 3), st.none() | st.integers(4, 12)), max_size=4
)
RUNS = st.lists(st.tuples(st.integers(0, 4), LABELS), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(RULES, RUNS, st.randoms(use_true_random=False))
def test_no_rule_is_broken_and_every_run_gets_a_place(
    rules: list[Rule], runs: list[tuple[int, dict[str, str]]], draw: Random
) -> None:
    deployment = Deployment(*rules)
    entries = [entry(number, float(usd), **labels) for number, (usd, labels) in enumerate(runs)]
    coming, ended, day = list(entries), set[int](), 0
    draw.shuffle(coming)
    while len(ended) < len(entries):
        if coming and draw.random() < 0.6:
            deployment.come(coming.pop())
        elif deployment.places.holding and draw.random() < 0.7:
            number = draw.choice(holders(deployment.places))
            deployment.end(number, cost=draw.uniform(0, entries[number].usd))
            ended.add(number)
        else:
            day += 1
            deployment.look(str(BEGAN.date() + timedelta(days=day)))
        assert day < 1000, f"{deployment.waits} wait for ever"
        _check(deployment)


def _check(deployment: Deployment) -> None:
    places = deployment.places
    for rule in deployment.rules:
        held = [held for held in places.holding if rule.labels.items() <= held.labels.items()]
        assert rule.runs is None or len(held) <= rule.runs
        began = [held.usd for held in held if held.day == places.day]
        assert rule.usd is None or sum(began) <= rule.usd + 1e-6 or len(began) == 1
    waiting = [run.created for run in places.waiting]
    assert waiting == sorted(waiting)
    assert set(deployment.waits) == {int(run.run.removeprefix("job-"), 16) for run in places.waiting}


@pytest.mark.parametrize("runs", [1, 2])
def test_later_runs_do_not_overtake_a_run_that_waits_for_two_rules(runs: int) -> None:
    """Its two rules are never free at the same moment, unless a free place is kept for it."""
    deployment = Deployment(Rule("a.", {"a": "x"}, runs, None), Rule("b.", {"b": "x"}, runs, None))
    first = [entry(n, a="x") for n in range(runs)] + [entry(n, b="x") for n in range(runs, 2 * runs)]
    deployment.come(*first, entry(10, a="x", b="x"))
    for number in range(100, 100 + 2 * runs):
        label = "a" if number % 2 else "b"
        deployment.come(entry(number, 1.0, **{label: "x"}))
        held = [h for h in deployment.places.holding if label in h.labels]
        deployment.end(int(held[0].run.removeprefix("job-"), 16))
    assert 10 in holders(deployment.places)
