"""Explore every reachable state of a run, within a bound, with the real stages and workflow."""

from __future__ import annotations

import pytest

from dropforge_local.chaos.model import Explorer


@pytest.mark.parametrize(
    ("faults", "cancel"),
    [
        (0, True),
        pytest.param(1, False, marks=pytest.mark.slow),
    ],
    ids=["a cancel at any time", "one fault at any effect"],
)
def test_every_state_keeps_the_rules_and_can_reach_a_good_end(faults: int, cancel: bool) -> None:
    explorer = Explorer(faults, cancel)
    explorer.explore()
    transitions = sum(map(len, explorer.edges.values()))
    print(f"{len(explorer.edges)} states, {transitions} transitions")
    problems = [f"{problem}: {'; '.join(explorer.way(state))}" for state, problem in explorer.problems[:5]]
    assert problems == []
    assert len(explorer.edges) > 100
