"""The rule about places reports each way to break it: the defect is put into the code, and seeds run with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dropforge.run.places import Places
from dropforge.stages import ending, places
from dropforge_local.chaos.checker import check
from dropforge_local.chaos.simulation import run

SEED = 67  # its policy lets one run begin, and at least two wait at once


def _too_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(places, "_rules", lambda context: [rule._replace(runs=9) for rule in RULES(context)])


def _overtaken(patch: pytest.MonkeyPatch) -> None:
    """Among those that wait, the last begins first."""

    def backwards(self: Places, *arguments: Any) -> Any:
        given, waits = GIVEN_OUT(self.model_copy(update={"waiting": self.waiting[::-1]}), *arguments)
        return given.model_copy(update={"waiting": given.waiting[::-1]}), waits

    patch.setattr(Places, "given_out", backwards)


def _kept(patch: pytest.MonkeyPatch) -> None:
    for module in (ending, places):
        patch.setattr(module, "leave", lambda *_: None)
    patch.setattr(places, "repair", lambda *_: None)


RULES, GIVEN_OUT = places._rules, Places.given_out


@pytest.mark.parametrize(
    ("defect", "problem"),
    [
        (_too_many, "runs hold a place; the policy has 1"),
        (_overtaken, "which was submitted earlier"),
        (_kept, "after the end of all runs"),
    ],
    ids=["too many", "overtaken", "kept"],
)
def test_a_defect_is_reported(
    defect: Callable[[pytest.MonkeyPatch], None], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    found = [str(found) for found in check(run(SEED)) if found.rule == "places_are_kept"]
    assert any(problem in text for text in found), found
