"""Lives of named endpoints: rollouts, canaries and budgets with random faults keep every promise."""

from __future__ import annotations

from typing import Any

import pytest

from dropforge.endpoints.record import EndpointRecord
from dropforge.stages.rollout import advance, canary
from dropforge.stages.sweep import named
from dropforge_local.chaos.endpoint_lives import run
from dropforge_local.chaos.endpoint_rules import check
from dropforge_local.chaos.named import NamedCloud

# Seeds that revealed a defect; docs/measurements.md describes it.
DEFECTS = {90: "a call that was suspended moved the requests back to a canary's share, after its promotion"}


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_lives_of_endpoints_keep_every_promise(first: int) -> None:
    problems = [f"seed {seed}: {problem}" for seed in range(first, first + 8) for problem in check(run(seed))]
    assert problems == []


@pytest.mark.parametrize("seed", DEFECTS)
def test_lives_that_revealed_a_defect_keep_every_promise(seed: int) -> None:
    assert check(run(seed)) == []


def test_a_life_repeats() -> None:
    assert run(3).digest == run(3).digest


BREAKAGES: list[tuple[str, Any, str, Any, str]] = [
    ("nothing is suspended", EndpointRecord, "is_spent", lambda *_: False, "a_budget_holds"),
    ("the cloud suspends nothing", NamedCloud, "suspend", lambda *_: True, "the_cloud_is_as_the_record_says"),
    ("the cloud suspends nothing", NamedCloud, "suspend", lambda *_: True, "a_suspended_endpoint_costs_nothing"),
    ("nothing is resumed", named, "resume", lambda _, record, *__: record, "suspension_follows_the_budget"),
    ("a canary passes at once", canary, "has_passed", lambda *_: True, "a_canary_is_watched_first"),
    ("failures do not count", canary, "_failures", lambda *_: "", "a_bad_canary_is_never_promoted"),
    ("no completion is wanted", advance, "completion_problem", lambda *_: "", "a_completion_comes_first"),
    ("a promotion moves nothing", NamedCloud, "shift", lambda *_: True, "the_cloud_is_as_the_record_says"),
    ("a call is never too late", advance, "_fence", lambda *_: lambda: None, "requests_reach_who_may_answer"),
]


@pytest.mark.parametrize(
    ("why", "owner", "name", "broken", "rule"), BREAKAGES, ids=[f"{why}-{rule}" for why, *_, rule in BREAKAGES]
)
def test_the_rules_notice_a_broken_promise(
    monkeypatch: pytest.MonkeyPatch, why: str, owner: Any, name: str, broken: Any, rule: str
) -> None:
    monkeypatch.setattr(owner, name, broken)
    seeds = (120, 134, 201) if name == "_fence" else range(6)  # one life in a hundred has a call that comes too late
    assert any(problem.startswith(rule) for seed in seeds for problem in check(run(seed))), why
