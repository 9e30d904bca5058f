"""Runs wait for a place of the policy: while two functions decide at once, after crashes, cancels and lost objects."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.context import Context
from dropforge.run.places import Places
from dropforge.run.record import Outcome, Record, RunError, RunState, Transition
from dropforge.run.store import RunStore
from dropforge.spec import parse_spec
from dropforge.stages.answers import Pending
from dropforge.stages.cancel import cancel
from dropforge.stages.ceiling import policy_problems
from dropforge.stages.looks import LONGEST_TURN_SECONDS, SHORTEST_TURN_SECONDS
from dropforge.stages.places import OBJECT, repair, wait_for_place
from dropforge.stages.provision import provision
from dropforge.stages.teardown import teardown

from ..deployments import Memory, context_with, settings_with
from .test_ceiling import document, policy_with, spec_with

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
L4_USD = 1.4209


class Deployment:
    """A deployment with a policy, whose clock the test sets and whose run events it keeps."""

    def __init__(self, **rules: Any) -> None:
        self.storage, self.events, self.now = Memory(), list[dict[str, Any]](), NOW
        policy = json.dumps({"api_version": "dropforge/v1", **rules})
        self.settings = settings_with(policy=policy, project="p1")
        self.context = self.another()

    def another(self) -> Context:
        """The context of another instance of the functions, which remembers nothing."""
        publisher = SimpleNamespace(publish=self.publish)
        return context_with(self.settings, lambda: self.now, storage=self.storage, publisher=publisher)

    def publish(self, topic: str, data: bytes, **_: Any) -> Any:
        self.events.append(json.loads(data))
        return SimpleNamespace(result=lambda _: "1")

    def accept(self, number: int, **changes: Any) -> str:
        """Store the `number`-th run as `submit` does; return its id."""
        run, created = f"job-{number:012x}", NOW + timedelta(seconds=number)
        spec = parse_spec(json.dumps(document(**changes)).encode())
        assert self.context.store.put_new(names.spec_object(run), spec.model_dump_json(by_alias=True).encode())
        history = [Transition(state=RunState.ACCEPTED, time=created)]
        record = Record(run=run, name="job", source="", state=RunState.ACCEPTED, created=created, history=history)
        assert self.context.store.create(record)
        return run

    def ask(self, run: str, context: Context | None = None) -> Pending | None:
        context = context or self.context
        return wait_for_place(context, run, f"execution of {run}", context.store.spec(run))

    def record(self, run: str) -> Record:
        return self.another().store.record(run)

    def end(self, run: str) -> None:
        """End a run as the workflow does."""
        failed = Outcome(state=RunState.FAILED, error=RunError(error_class=ErrorClass.CODE, message="it failed"))
        assert teardown(self.context, run, f"execution of {run}", "run", False, failed).status == "ENDED"

    def holding(self) -> list[str]:
        return [entry.run for entry in self.places().holding]

    def places(self) -> Places:
        return Places.model_validate_json(self.storage.objects[OBJECT][0])


def test_a_run_waits_says_its_place_and_begins_when_an_earlier_run_ends() -> None:
    deployment = Deployment(max_runs=1)
    first, second, third = (deployment.accept(number) for number in range(3))
    assert deployment.ask(first) is None
    for run, place in ((second, 1), (third, 2)):
        answer = provision(deployment.context, run, f"execution of {run}", 1)
        assert (answer.status, answer.to_json()["wait_seconds"]) == ("PENDING", SHORTEST_TURN_SECONDS)
        queued = deployment.record(run).queued
        assert queued is not None
        assert (queued.rule, queued.place) == ("max_runs", place)
    deployment.end(first)
    assert deployment.ask(third) is not None
    assert deployment.ask(second) is None
    assert deployment.record(second).placed == NOW
    assert deployment.record(second).queued is None
    assert [event["run"] for event in deployment.events if event["notice"] == "queued"] == [second, third]


def test_waiting_takes_no_time_of_the_run_and_is_looked_at_less_and_less_often() -> None:
    deployment = Deployment(max_runs=1)
    first, second = deployment.accept(0), deployment.accept(1)
    deployment.ask(first)
    pauses = []
    for hours in (0, 1, 50):
        deployment.now = NOW + timedelta(hours=hours)
        answer = deployment.ask(second)
        assert answer is not None
        pauses.append(answer.wait_seconds)
        assert answer.deadline is not None
        assert answer.deadline > deployment.now.timestamp()
    assert pauses == [SHORTEST_TURN_SECONDS, 180.0, LONGEST_TURN_SECONDS]
    deployment.end(first)
    assert deployment.ask(second) is None
    assert deployment.record(second).began == deployment.now


def test_two_functions_at_once_never_give_away_the_last_place_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second function decides between the first one's read and its write."""
    deployment = Deployment(max_runs=1)
    first, second = deployment.accept(0), deployment.accept(1)
    write, answers = RunStore.try_write, list[Pending | None]()

    def overtaken(store: RunStore, name: str, *arguments: Any) -> bool:
        monkeypatch.setattr(RunStore, "try_write", write)
        answers.append(deployment.ask(second, deployment.another()))
        return write(store, name, *arguments)

    monkeypatch.setattr(RunStore, "try_write", overtaken)
    answers.append(deployment.ask(first))
    assert answers[0] is None
    assert answers[1] is not None
    assert deployment.holding() == [second]


def test_a_decision_on_places_that_have_changed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second function gives away the last place while the first one decides."""
    deployment = Deployment(max_runs=1)
    first, second = deployment.accept(0), deployment.accept(1)
    given_out, answers = Places.given_out, list[Pending | None]()

    def overtaken(places: Places, *arguments: Any) -> Any:
        monkeypatch.setattr(Places, "given_out", given_out)
        answers.append(deployment.ask(second, deployment.another()))
        return given_out(places, *arguments)

    monkeypatch.setattr(Places, "given_out", overtaken)
    answers.append(deployment.ask(first))
    assert [answer is None for answer in answers] == [True, False]
    assert deployment.holding() == [second]


def test_a_crash_after_the_decision_loses_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(max_runs=1)
    run, other = deployment.accept(0), deployment.accept(1)

    def crash(*_: Any) -> Any:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(Record, "with_place", crash)
        with pytest.raises(TimeoutError):
            deployment.ask(run)
    assert deployment.record(run).placed is None
    assert deployment.ask(other) is not None
    assert deployment.ask(run) is None
    assert deployment.holding() == [run]


@pytest.mark.parametrize("how", ["before it looks again", "while it is given a place"])
def test_a_run_that_is_cancelled_while_it_waits_keeps_no_place(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(max_runs=1)
    first, second, third = (deployment.accept(number) for number in range(3))
    for run in (first, second, third):
        deployment.ask(run)
    if how == "before it looks again":
        cancel(deployment.context, second)
        deployment.end(first)
    else:
        deployment.end(first)  # the second run has the place now, and does not know it
        cancel(deployment.another(), second)
    assert deployment.ask(second) is None
    assert deployment.record(second).state is RunState.CANCELLED
    assert deployment.record(second).queued is None
    assert deployment.ask(third) is None
    assert deployment.holding() == [third]


def test_a_cancel_between_the_decision_and_its_note_gives_the_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(max_runs=1)
    run = deployment.accept(0)
    write = RunStore.try_write

    def cancelled(store: RunStore, name: str, *arguments: Any) -> bool:
        monkeypatch.setattr(RunStore, "try_write", write)
        cancel(deployment.another(), run)
        return write(store, name, *arguments)

    monkeypatch.setattr(RunStore, "try_write", cancelled)
    assert deployment.ask(run) is None
    assert deployment.holding() == []


def test_the_sweep_takes_the_places_of_runs_that_ended_and_finds_lost_ones() -> None:
    deployment = Deployment(max_runs=2)
    ended, running, waiting = (deployment.accept(number) for number in range(3))
    for run in (ended, running, waiting):
        deployment.ask(run)
    store = deployment.context.store
    store.update(ended, lambda record: record.entered(RunState.CANCELLED, NOW))  # and then its function crashed
    records = {run: deployment.record(run) for run in (ended, running, waiting)}
    repair(deployment.context, records)
    assert deployment.holding() == [running, waiting]
    del deployment.storage.objects[OBJECT]
    repair(deployment.another(), records)
    assert deployment.holding() == [running, waiting]
    assert deployment.ask(waiting) is None


def test_runs_that_cannot_enter_wait_and_one_sweep_enters_all_of_them_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cloud Storage takes one write of the object a second; many runs ask at once."""
    deployment = Deployment(max_runs=1)
    runs = [deployment.accept(number) for number in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "try_write", lambda *_: False)
        answers = [deployment.ask(run) for run in reversed(runs)]
    assert None not in answers
    records = {run: deployment.record(run) for run in runs}
    assert [record.queued and record.queued.rule for record in records.values()] == ["max_runs"] * 3
    repair(deployment.context, records)
    assert deployment.holding() == runs[:1]
    assert [deployment.ask(run) is None for run in runs] == [True, False, False]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"holding": 5}', b"\xff"])
def test_an_unreadable_object_is_begun_again(content: bytes) -> None:
    deployment = Deployment(max_runs=1)
    run = deployment.accept(0)
    deployment.context.store.put_new(OBJECT, content)
    assert deployment.ask(run) is None
    assert deployment.holding() == [run]


@pytest.mark.parametrize("rules", [{}, {"by_label": [{"labels": {"team": "search"}, "max_runs": 1}]}])
def test_a_run_that_no_rule_limits_needs_no_place(rules: dict[str, Any]) -> None:
    deployment = Deployment(**rules)
    run = deployment.accept(0)
    assert deployment.ask(run) is None
    assert OBJECT not in deployment.storage.objects
    assert deployment.record(run).placed is None


def test_money_of_the_day_counts_the_maximum_cost_and_gets_the_unused_part_back() -> None:
    hours = {"limits": {"max_duration": "2h"}}
    deployment = Deployment(max_usd_per_day=2 * L4_USD + 0.5)
    first, second = deployment.accept(0, **hours), deployment.accept(1, **hours)
    assert deployment.ask(first) is None
    assert deployment.ask(second) is not None
    queued = deployment.record(second).queued
    assert queued is not None
    assert queued.rule == "max_usd_per_day"
    assert deployment.places().used == {"": pytest.approx(2 * L4_USD)}
    deployment.end(first)  # without any attempt
    assert deployment.ask(second) is None
    third = deployment.accept(2, **hours)
    assert deployment.ask(third) is not None
    deployment.now += timedelta(days=1)
    assert deployment.ask(third) is None


def test_a_run_dearer_than_a_day_and_a_run_of_unknown_cost_are_rejected() -> None:
    policy = policy_with(max_usd_per_day=2)
    [dear] = policy_problems(spec_with(limits={"max_duration": "3h"}), policy)
    assert str(dear).startswith("/limits/max_cost_usd: more than `max_usd_per_day`")
    assert policy_problems(spec_with(limits={"max_duration": "3h", "max_cost_usd": 1.5}), policy) == []
    unpriced = {"type": "gke", "placements": [{"region": "us-central1"}]}
    unknown = [str(problem) for problem in policy_problems(spec_with(target=unpriced), policy)]
    assert any("demanded by `max_usd_per_day`" in problem for problem in unknown)


def test_a_broken_policy_stops_no_accepted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = Deployment(max_runs=1)
    first, second = deployment.accept(0), deployment.accept(1)
    deployment.ask(first)
    deployment.settings = settings_with(policy="{")
    assert deployment.ask(second, deployment.another()) is None
