"""Explore every reachable state of a run, within a bound, with the real stages and workflow."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from dropforge_local.chaos.model import Explorer, steps

Explored = Callable[[int, bool], Explorer]


@pytest.fixture(scope="module")
def explored() -> Explored:
    """Return a function that explores once for all tests."""

    @cache
    def explored(faults: int, cancel: bool) -> Explorer:
        explorer = Explorer(faults, cancel)
        explorer.explore()
        return explorer

    return explored


@pytest.mark.parametrize(
    ("faults", "cancel"),
    [
        (0, True),
        pytest.param(1, False, marks=pytest.mark.slow),
    ],
    ids=["a cancel at any time", "one fault at any effect"],
)
def test_every_state_keeps_the_rules_and_can_reach_a_good_end(explored: Explored, faults: int, cancel: bool) -> None:
    explorer = explored(faults, cancel)
    transitions = sum(map(len, explorer.edges.values()))
    print(f"{len(explorer.edges)} states, {transitions} transitions")
    problems = [f"{problem}: {'; '.join(explorer.way(state))}" for state, problem in explorer.problems[:5]]
    assert problems == []
    assert len(explorer.edges) > 100


def test_a_step_that_is_taken_once_has_the_same_result_in_every_state(explored: Explored) -> None:
    """The explorer takes a step once for states that differ only in what no code reads, and a death once, too."""
    explorer = explored(0, True)
    kinds = {(state.record.get("state"), state.cloud, state.late, state.mail): state for state in explorer.edges}
    assert len(kinds) > 20
    for state in kinds.values():
        for step in steps(state):
            shared = explorer.change(step, state, None)
            assert explorer.take(step, state, None) == shared
            for number, first in enumerate(shared.deaths, 1):
                own, of_first = explorer.take(step, state, number), explorer.change(step, state, first)
                assert state.after(own, True) == state.after(of_first, True), (step.name, number, first)
