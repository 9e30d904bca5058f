"""A training that hangs between two steps: one restart by default, then the end, long before `stuck_after`."""

from __future__ import annotations

from typing import Any

import pytest

from dropforge_local.chaos.checker import check
from dropforge_local.chaos.history import History
from dropforge_local.chaos.simulation import run_alone
from dropforge_local.chaos.specs import TARGETS, whole
from dropforge_local.chaos.trainer import Work


def hung(target: str, *fates: str) -> tuple[History, dict[str, Any]]:
    """The life of a run whose attempts have these fates and whose trainer reports its steps, and its last record."""
    spec = {**whole(target), "limits": {"max_duration": "3h"}, "serve": None, "evaluation": None}
    history = run_alone(spec, Work(total=2400.0, metric=0.9, reports=True, fates=list(fates)))
    writes = [fact.data for fact in history.of("write") if fact.data["name"].endswith("/record.json")]
    return history, writes[-1]["content"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("fates", "state"), [(("hung", ""), "SUCCEEDED"), (("hung", "hung"), "FAILED")])
def test_a_training_that_hangs_is_restarted_once(target: str, fates: tuple[str, ...], state: str) -> None:
    history, record = hung(target, *fates)
    assert [str(problem) for problem in check(history)] == []
    assert record["state"] == state
    ends = [attempt["error"] and attempt["error"]["error_class"] for attempt in record["attempts"]]
    assert ends == ["stuck" if fate else None for fate in fates]
    events = [fact.data["event"] for fact in history.of("published") if fact.data["topic"] == "run-events"]
    told = [event["details"]["text"] for event in events if str(event["notice"]).startswith("stuck-a")]
    follow = ["Another attempt resumes from the last checkpoint", "The run ends; its checkpoints are kept"]
    assert "; a step usually takes 1.0 s. The cloud reports that it runs" in told[0]
    assert [follows in text for text, follows in zip(told, follow, strict=False)] == [True] * fates.count("hung")


@pytest.mark.parametrize("target", TARGETS)
def test_a_training_that_reports_its_steps_is_never_stuck(target: str) -> None:
    _, record = hung(target, "")
    assert (record["state"], record["notices"]) == ("SUCCEEDED", ["training-a1"])
