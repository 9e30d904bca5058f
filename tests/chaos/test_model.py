"""Every state that the life of one run can come to, with the code's own functions and workflow, within a bound."""

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
def test_every_life_keeps_the_rules_and_can_come_to_a_good_end(faults: int, cancel: bool) -> None:
    explorer = Explorer(faults, cancel)
    explorer.explore()
    transitions = sum(map(len, explorer.edges.values()))
    print(f"{len(explorer.edges)} states, {transitions} transitions")
    found = [f"{problem}: {'; '.join(explorer.way(state))}" for state, problem in explorer.problems[:5]]
    assert found == []
    assert len(explorer.edges) > 100
