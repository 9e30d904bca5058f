"""Weeks of virtual time: a long run and an endpoint with many rollouts stay within the limits of Google's services.

The engine enforces the limits of Cloud Workflows (workflows_engine/limits.py), and counts the steps of each execution.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from typing import Any

import pytest

from dropforge_local.chaos import checker, endpoint_rules, specs, trainer
from dropforge_local.chaos.endpoint_lives import DAY, FREE, RUNS_OF_A_LIFE
from dropforge_local.chaos.endpoint_lives import run_alone as run_endpoint
from dropforge_local.chaos.history import Fact, History
from dropforge_local.chaos.simulation import run_alone
from dropforge_local.chaos.trainer import Work
from workflows_engine import Limits
from workflows_engine.billing import cost_usd

RUN_DAYS, PREEMPTIONS, CHECKPOINTS = 14, 40, 300
ENDPOINT_DAYS = 90
KIB = 1024
# https://cloud.google.com/storage/quotas: one write a second of the same object
WINDOW_SECONDS, WRITES_IN_WINDOW = 60.0, 60
HALF = 0.5  # of a limit: the other half is for faults and for waits


@cache
def long_run() -> History:
    """A run of two weeks whose machine is preempted every eight hours, with a point of progress a minute."""
    seconds = RUN_DAYS * DAY
    target = {"type": "gke", "placements": [{"region": "us-central1", "capacity": "spot"}], "price_usd_per_hour": 2.0}
    limits = {"max_duration": "15d", "max_attempts": 50, "retry": {"preempted": PREEMPTIONS}}
    policy = {"api_version": "dropforge/v1", "max_duration": "15d", "max_attempts": 50, "max_retries": PREEMPTIONS}
    work = Work(
        total=seconds,
        metric=0.9,
        reports=True,
        fates=["preempted"] * PREEMPTIONS,
        fate_after=seconds / (PREEMPTIONS + 1),
        checkpoint_every=seconds / (CHECKPOINTS + PREEMPTIONS),  # an attempt's last part is too short for one
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "REPORT_SECONDS", (60.0, 60.0))
        spec = specs.spec("job-0", target, limits=limits)
        return run_alone(spec, work, seconds=seconds + DAY, policy=json.dumps(policy))


@cache
def long_endpoint() -> History:
    """A name that gets another model each day, and is retired at the end."""
    models = RUNS_OF_A_LIFE[:3]
    rollouts = [
        (24.0 * day + 0.1, {"serve": {"run": models[day % len(models)], "endpoint": FREE}})
        for day in range(ENDPOINT_DAYS)
    ]
    return run_endpoint((*rollouts, (24.0 * ENDPOINT_DAYS, {"retire": FREE})), (ENDPOINT_DAYS + 1) * DAY)


def contents(history: History, suffix: str) -> list[dict[str, Any]]:
    """The documents that were written to objects whose name ends so."""
    return [fact.data["content"] for fact in history.of("write") if fact.data["name"].endswith(suffix)]


def kib(document: dict[str, Any]) -> float:
    return len(json.dumps(document)) / KIB


def workflow_usd(ended: Fact) -> float:
    steps, external = ended.data["steps"], ended.data["external_steps"]
    return cost_usd(steps - external, external)


def busiest(history: History) -> int:
    """The most writes of one object in a minute."""
    times: dict[str, list[float]] = defaultdict(list)
    for fact in history.of("write"):
        times[fact.data["name"]].append(fact.time)
    most = 0
    for each in times.values():
        first = 0
        for last, time in enumerate(each):
            while each[first] <= time - WINDOW_SECONDS:
                first += 1
            most = max(most, last - first + 1)
    return most


def test_a_run_of_two_weeks_has_one_execution_with_half_of_the_allowed_steps() -> None:
    history = long_run()
    assert checker.check(history) == []
    (ended,) = history.of("execution_ended")
    assert (ended.data["state"], ended.data["result"]["status"]) == ("SUCCEEDED", "SUCCEEDED")
    assert ended.data["steps"] < HALF * Limits().steps
    assert workflow_usd(ended) < 1.0


def test_the_record_of_a_run_of_two_weeks_stays_small() -> None:
    """Attempts and their resources are in the record; points and checkpoints are not."""
    history = long_run()
    told = [fact.data["type"] for fact in history.of("told")]
    assert told.count("progress") > RUN_DAYS * 1440 - 2 * PREEMPTIONS
    assert told.count("checkpoint") >= CHECKPOINTS
    records = contents(history, "/record.json")
    assert len(records[-1]["attempts"]) == PREEMPTIONS + 1
    assert kib(records[-1]) < 64
    assert len(records) < 10 * (PREEMPTIONS + 1)
    assert busiest(history) <= WRITES_IN_WINDOW


def test_a_run_of_two_weeks_asks_the_functions_every_five_minutes() -> None:
    history = long_run()
    calls = sum(not fact.data["instance"].startswith("sweep") for fact in history.of("call"))
    assert calls < RUN_DAYS * DAY / 300 + 20 * PREEMPTIONS + 2 * CHECKPOINTS


def test_daily_rollouts_for_three_months_have_short_executions() -> None:
    history = long_endpoint()
    assert endpoint_rules.check(history) == []
    ended = list(history.of("execution_ended"))
    assert [fact.data["result"]["status"] for fact in ended] == ["PROMOTED"] * ENDPOINT_DAYS + ["RETIRED"]
    assert max(fact.data["steps"] for fact in ended) < 0.01 * Limits().steps
    assert sum(map(workflow_usd, ended)) < 1.0


def test_the_records_of_an_endpoint_and_of_its_runs_stay_small() -> None:
    """The endpoint keeps its last 100 rollouts and revisions; each of its runs has a notice for each rollout."""
    history = long_endpoint()
    records = contents(history, f"{FREE}/record.json")
    assert len(records[-1]["rollouts"]) == ENDPOINT_DAYS + 1
    assert kib(records[-1]) < 128
    assert max(kib(record) for record in contents(history, "/record.json") if "run" in record) < 8
    assert len(records) < 40 * ENDPOINT_DAYS
    assert busiest(history) <= WRITES_IN_WINDOW
