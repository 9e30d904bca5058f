"""How often the functions of a run look at the cloud while it works, and that a cancel ends every wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dropforge_local.chaos import gke, specs
from dropforge_local.chaos.checker import check
from dropforge_local.chaos.history import Fact, History
from dropforge_local.chaos.simulation import run_alone
from dropforge_local.chaos.trainer import Work

STAGES = ("provision", "inspect", "deploy", "teardown")
HOUR, MOST_LOOKS = 3600.0, 40
PROMPT_SECONDS = 2.0  # for a message, the function that handles it and the callback
OWN_CLUSTER = specs.spec(
    "job-0",
    {
        "type": "gke",
        "placements": [{"region": "us-central1"}],
        "cluster": {"create": True},
        "price_usd_per_hour": specs.TRAINING_USD,
    },
    limits={"max_duration": "2h"},
)
SERVED = specs.whole("gke")


@pytest.fixture(autouse=True)
def _usual_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that takes 8 minutes to create and 4 to delete."""
    monkeypatch.setattr(gke, "CREATION_SECONDS", ((480, 480), (480, 480)))
    monkeypatch.setattr(gke, "DELETION_SECONDS", ((240, 240), (240, 240)))


def calls(history: History, stages: tuple[str, ...] = STAGES) -> Iterator[Fact]:
    return (fact for fact in history.of("call", "answer") if fact.data["instance"].rpartition("-")[0] in stages)


def test_an_attempt_with_its_own_cluster_is_looked_at_seldom() -> None:
    history = run_alone(OWN_CLUSTER, Work(total=2400.0, metric=0.9))
    assert check(history) == []
    times = [fact.time for fact in calls(history) if fact.kind == "call"]
    assert times[-1] - times[0] > 52 * 60  # 8 minutes of creation, 40 of training, 4 of deletion
    assert max(sum(since <= time < since + HOUR for time in times) for since in times) <= MOST_LOOKS


@pytest.mark.parametrize(
    ("stage", "spec"), [("provision", OWN_CLUSTER), ("deploy", SERVED)], ids=["provision", "deploy"]
)
def test_a_cancel_ends_the_longest_wait_of_a_stage_at_once(stage: str, spec: dict[str, Any]) -> None:
    undisturbed = run_alone(spec, Work(total=300.0, metric=0.9))
    dropped = next(undisturbed.of("dropped")).time
    answers = [f for f in calls(undisturbed, (stage,)) if f.kind == "answer" and f.data["body"]["status"] == "PENDING"]
    pending = max(answers, key=lambda fact: fact.data["body"]["wait_seconds"])
    assert pending.data["body"]["wait_seconds"] == 30
    history = run_alone(spec, Work(total=300.0, metric=0.9), cancel_after=pending.time + 3 - dropped)
    assert check(history) == []
    cancelled = next(history.of("cancel")).time
    assert cancelled == pytest.approx(pending.time + 3)
    seen = next(f for f in calls(history, (stage,)) if f.kind == "answer" and f.data["body"]["status"] == "CANCELLED")
    assert seen.time - cancelled < PROMPT_SECONDS
