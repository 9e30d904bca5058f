"""Many runs against the quotas of a project: every rule holds, and every rule notices a history that breaks it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from dropforge.run.places import Places
from dropforge.stages import provision
from dropforge_local.chaos.history import Fact, History
from dropforge_local.chaos.quotas import Answer, Growing, Quotas, Rate
from dropforge_local.chaos.scale import REGIONS, Crowd, run_crowd
from dropforge_local.chaos.scale_rules import check_crowd

# More runs than one region has room for, and for two regions with a policy for less than they have room.
FULL = Crowd(runs=30, within=300, part=0.012, regions=REGIONS[:1], training_seconds=1200, quotas=Quotas(run_writes=600))
ORDERED = Crowd(runs=40, within=1200, part=0.05, regions=REGIONS[:2], training_seconds=1200, max_runs=12)
# The quota of three regions is full for longer than ten refused attempts last.
LONG = Crowd(runs=8, within=10, part=0.001, regions=REGIONS[:3], quotas=Quotas(run_writes=3e6, run_reads=3e6))


@cache
def lived(crowd: Crowd) -> History:
    return run_crowd(crowd)


def refusals(history: History) -> Counter[str]:
    return Counter(fact.data["quota"] for fact in history.of("quota"))


def problems(history: History) -> list[str]:
    return [str(problem) for problem in check_crowd(history)]


def test_runs_wait_for_quotas_and_none_fails() -> None:
    """More runs than jobs are allowed: the rest waits, with the reason in the record, until others have ended."""
    assert problems(lived(FULL)) == []
    met = refusals(lived(FULL))
    assert min(met["jobs"], met["object_writes"], met["run_writes"]) > 0, met


def test_places_are_given_in_order_while_the_object_of_places_takes_few_writes() -> None:
    assert problems(lived(ORDERED)) == []
    met = refusals(lived(ORDERED))
    assert met["shared_writes"] > 0, met
    assert met["jobs"] == 0, "the policy lets fewer runs begin than there is room for"


@pytest.mark.parametrize("answer", ["failed", "waits"])
def test_each_answer_to_one_more_running_execution_is_only_a_wait(answer: Answer) -> None:
    """It is not documented how Cloud Run answers: the quota of jobs is larger here, so that this quota is met first."""
    quotas = Quotas(running_jobs=300, run_writes=3000, run_reads=60_000, answer=answer)
    crowd = Crowd(runs=30, within=120, part=0.02, regions=REGIONS[:1], training_seconds=600, quotas=quotas)
    history = run_crowd(crowd)
    assert refusals(history)["running_jobs"] > 0
    assert problems(history) == []


def test_a_backlog_of_executions_starts_in_order_and_is_told_once() -> None:
    """Executions wait in a queue of Cloud Workflows, and beyond the backlog their creation is refused."""
    quotas = Quotas(executions=1000, backlog=1500, run_writes=3000, run_reads=60_000)
    history = run_crowd(Crowd(runs=60, within=60, part=0.02, training_seconds=300, quotas=quotas))
    assert min(refusals(history)["executions"], refusals(history)["backlog"]) > 0
    assert problems(history) == []


def test_the_same_crowd_has_the_same_history() -> None:
    crowd = Crowd(runs=8, part=0.01, training_seconds=300)
    assert run_crowd(crowd).digest == run_crowd(crowd).digest != run_crowd(crowd, seed=1).digest


# Broken code


def _fail_for_quota(patch: pytest.MonkeyPatch) -> None:
    """As before quotas were waited for: each refusal ends an attempt."""
    patch.setattr(provision, "_has_untried_placement", lambda *_: True)


def _last_first(patch: pytest.MonkeyPatch) -> None:
    """Among those that wait, the last begins first."""
    given_out = Places.given_out

    def backwards(self: Places, *arguments: Any) -> Any:
        given, waits = given_out(self.model_copy(update={"waiting": self.waiting[::-1]}), *arguments)
        return given.model_copy(update={"waiting": sorted(given.waiting, key=lambda entry: entry.created)}), waits

    patch.setattr(Places, "given_out", backwards)


@pytest.mark.parametrize(
    ("defect", "crowd", "rule"),
    [(_fail_for_quota, LONG, "every_run_succeeds"), (_last_first, ORDERED, "places_are_kept")],
)
def test_a_defect_is_reported(
    defect: Callable[[pytest.MonkeyPatch], None], crowd: Crowd, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    assert rule in {problem.rule for problem in check_crowd(run_crowd(crowd))}


# Broken histories


def changed(crowd: Crowd, change: Callable[[Fact], Fact | None]) -> History:
    """The history of a crowd, with other facts."""
    facts = [changed for fact in lived(crowd).facts if (changed := change(fact)) is not None]
    return History(0, facts)


def is_record(fact: Fact) -> bool:
    return fact.kind == "write" and str(fact.data["name"]).endswith("/record.json")


def rewritten(fact: Fact, change: Callable[[dict[str, Any]], None]) -> Fact:
    """A write of a record, with another content."""
    data = copy.deepcopy(fact.data)
    change(data["content"])
    return fact._replace(data=data)


def _lost(fact: Fact) -> Fact | None:
    victim = str(next(lived(FULL).of("dropped")).data["run"])
    return None if is_record(fact) and victim in fact.data["name"] else fact


def _failed(fact: Fact) -> Fact:
    if not is_record(fact) or fact.data["content"]["state"] != "SUCCEEDED":
        return fact
    return rewritten(fact, lambda record: record.update(state="FAILED"))


def _left(fact: Fact) -> Fact:
    return fact if fact.kind != "end" else fact._replace(data={**fact.data, "living": ["projects/p/jobs/df-1-a1"]})


def _not_ended(fact: Fact) -> Fact | None:
    return None if fact.kind == "execution_ended" else fact


def _never_refused(fact: Fact) -> Fact | None:
    return None if fact.kind == "quota" else fact


def _silent(fact: Fact) -> Fact:
    def forget(record: dict[str, Any]) -> None:
        for attempt in record["attempts"]:
            attempt.update(wait_reason="", error=None)

    return rewritten(fact, forget) if is_record(fact) else fact


def _runs_already(fact: Fact) -> Fact:
    """The machines began to run an hour before the cloud says so."""
    return fact._replace(time=fact.time - 3600) if fact.kind == "running" else fact


@cache
def last_created() -> str:
    return max(str(fact.data["content"]["created"]) for fact in lived(ORDERED).of("write") if is_record(fact))


def _overtaken(fact: Fact) -> Fact:
    """The run that was submitted last got a place before all others."""
    if not is_record(fact) or fact.data["content"]["created"] != last_created():
        return fact
    return rewritten(fact, lambda record: record.update(placed="2026-01-01T00:00:00Z"))


def test_an_unfair_history_is_reported() -> None:
    assert "starts_are_fair" in {problem.rule for problem in check_crowd(changed(ORDERED, _overtaken))}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (_lost, "every_run_succeeds"),
        (_failed, "every_run_succeeds"),
        (_left, "nothing_is_left"),
        (_not_ended, "nothing_is_left"),
        (_never_refused, "reasons_are_true"),
        (_runs_already, "reasons_are_true"),
        (_silent, "waits_are_explained"),
    ],
)
def test_a_broken_history_is_reported(change: Callable[[Fact], Fact | None], rule: str) -> None:
    assert rule in {problem.rule for problem in check_crowd(changed(FULL, change))}


# How quotas are counted


def test_a_rate_lets_a_second_thing_pass_after_its_pause() -> None:
    rate = Rate(0.5)
    assert [rate.take(now) for now in (10.0, 11.0, 12.0, 12.5)] == [True, False, True, False]
    assert [rate.take(now, load=0.25) for now in (16.0, 16.1)] == [True, False]


def test_the_rate_of_a_bucket_doubles_while_it_is_used() -> None:
    bucket = Growing(10.0)
    taken = [sum(bucket.take(float(second)) for _ in range(20)) for second in range(1, 1300)]
    assert taken[100] == 10
    assert taken[-1] == 20


def test_what_all_runs_share_is_scaled_and_the_rest_is_not() -> None:
    small = Quotas().scaled(0.05)
    assert (small.jobs, small.executions, small.calls, small.messages) == (50, 500, 1, 0.05)
    assert (small.object_writes, small.deliveries) == (1, 20)
