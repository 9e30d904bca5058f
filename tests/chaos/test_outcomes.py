"""The rules about outcomes report each broken promise: each mutation breaks a good history of test_checker.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from dropforge_local.chaos import outcomes, specs
from dropforge_local.chaos.checker import check
from dropforge_local.chaos.history import Fact
from dropforge_local.chaos.lives import read, seconds_of
from dropforge_local.chaos.simulation import run_alone
from dropforge_local.chaos.trainer import Work

from .test_checker import SPEC, Story, cancelled, served, stopped, stuck


def _no_manifest(story: Story) -> None:
    story.facts = [fact for fact in story.facts if "MANIFEST" not in fact.data.get("name", "")]


def _manifest_of_another_run(story: Story) -> None:
    _write_of(story, "MANIFEST").data["content"]["run"] = "other-0123456789ab"


def _metrics_of_a_forged_manifest(story: Story) -> None:
    for record in _records(story):
        record["metrics"] = {"exact_match": 1.0}


def _gate_not_passed(story: Story) -> None:
    gate = {"metric": "exact_match", "min": 0.95}
    _spec(story, evaluation={"gate": gate})


def _no_completion(story: Story) -> None:
    story.facts = [fact for fact in story.facts if fact.kind != "completion"]


def _completion_of_another_endpoint(story: Story) -> None:
    _first(story, "completion").data["url"] = "https://elsewhere"


def _completion_after_the_endpoint_was_ready(story: Story) -> None:
    story.facts.append(story.facts.pop(story.facts.index(_first(story, "completion"))))


def _success_without_the_endpoint(story: Story) -> None:
    for record in _records(story):
        record["endpoint"] = None


def _failure_without_a_reason(story: Story) -> None:
    for record in _records(story):
        record["error"] = None


def _deployment_too_long(story: Story) -> None:
    _delay(story, _first(story, "completion"), 1300)


def _cancel_without_effect_for_minutes(story: Story) -> None:
    _delay(story, next(fact for fact in story.facts if _state(fact) == "TEARING_DOWN"), 200)


def _success_after_a_cancel(story: Story) -> None:
    for record in _records(story):
        if record["state"] == "TEARING_DOWN":
            record["cancel_requested"] = record["created"]


def _retry_that_the_spec_forbids(story: Story) -> None:
    _spec(story, limits=SPEC["limits"] | {"retry": {"preempted": 0}})  # type: ignore[operator]


def _allowed_retry_not_made(story: Story) -> None:
    _fail_as(story, "infrastructure")


def _end_told_again(story: Story) -> None:
    told = next(fact for fact in story.facts if fact.kind == "slack" and fact.data["event"].endswith("succeeded"))
    story.facts.append(told._replace(time=story.now + 600))


def _notice_told_again(story: Story) -> None:
    told = next(fact for fact in story.facts if fact.kind == "slack" and fact.data["event"].endswith("budget-50"))
    story.facts.insert(-1, told._replace(time=told.time + 90))


def _end_long_after_the_last_fault(story: Story) -> None:
    story.facts.insert(0, Fact(story.facts[0].time, "calm", {}))
    _delay(story, next(fact for fact in story.facts if _state(fact) == "SUCCEEDED"), 9000)


def _charged_too_little(story: Story) -> None:
    for attempt in _attempts(story):
        attempt["running"] = attempt["ended"]


def _charged_too_much(story: Story) -> None:
    started = story.facts[0].time - 2000
    for attempt in _attempts(story):
        attempt["running"] = _iso(started)


def _charged_the_price_of_another_placement(story: Story) -> None:
    story.facts.insert(0, Fact(story.facts[0].time, "dearer", {"share": 0.5}))
    _spec(story, target={"placements": [{"region": "us-central1"}], "price_usd_per_hour": 0.36})
    for attempt in _attempts(story):
        attempt["usd_per_hour"] = 0.54


def _waiting_while_it_runs(story: Story) -> None:
    for attempt in _attempts(story):
        attempt["waiting"] = _iso(_first(story, "running").time + 300)


def _no_capacity_while_it_runs(story: Story) -> None:
    _fail_as(story, "stockout")
    for attempt in _attempts(story):
        attempt["ended"] = attempt["ended"] and _iso(_first(story, "running").time + 300)


def _refused_while_it_runs(story: Story) -> None:
    for attempt in _attempts(story):
        attempt["refused"] = True


def _trains_and_waits(story: Story) -> None:
    story.change(attempts=[story.record["attempts"][0] | {"wait_reason": "no quota"}], state="TRAINING")


def _ready_and_waits(story: Story) -> None:
    story.change(endpoint_wait_reason="no GPU")


def _cancelled_by_nobody(story: Story) -> None:
    story.change(attempts=[story.record["attempts"][0] | {"cancelled": True}])


def _record_written_for_another_run(story: Story) -> None:
    _call_for_another_run(story)
    _write_of(story, "record.json").data["by"] = "notify-1"


def _machine_deleted_for_another_run(story: Story) -> None:
    _call_for_another_run(story)
    _first(story, "deleting").data["by"] = "notify-1"


def _sweep_that_never_ends(story: Story) -> None:
    story.add("call", instance="sweep-9")
    story.add("answer", after=600, instance="sweep-9", status=200, body={"problems": ["unfinished"]})


MUTATIONS: list[tuple[str, Callable[[], Story], Callable[[Story], None]]] = [
    ("success_has_a_model", served, _no_manifest),
    ("success_has_a_model", served, _manifest_of_another_run),
    ("success_has_a_model", served, _metrics_of_a_forged_manifest),
    ("success_has_a_model", served, _gate_not_passed),
    ("ready_means_answered", served, _no_completion),
    ("ready_means_answered", served, _completion_of_another_endpoint),
    ("ready_means_answered", served, _completion_after_the_endpoint_was_ready),
    ("success_serves", served, _success_without_the_endpoint),
    ("failure_says_why", stopped, _failure_without_a_reason),
    ("startup_is_limited", served, _deployment_too_long),
    ("cancel_is_prompt", cancelled, _cancel_without_effect_for_minutes),
    ("cancel_prevents_success", served, _success_after_a_cancel),
    ("retries_are_counted", served, _retry_that_the_spec_forbids),
    ("retries_are_counted", stopped, _allowed_retry_not_made),
    ("told_once", served, _end_told_again),
    ("told_once", stopped, _notice_told_again),
    ("ends_in_time", served, _end_long_after_the_last_fault),
    ("cost_is_true", stopped, _charged_too_little),
    ("cost_is_true", served, _charged_too_much),
    ("prices_are_of_the_placement", served, _charged_the_price_of_another_placement),
    ("waits_are_true", stopped, _waiting_while_it_runs),
    ("waits_are_true", stopped, _no_capacity_while_it_runs),
    ("nothing_costs_nothing", stopped, _refused_while_it_runs),
    ("reasons_are_true", stuck, _trains_and_waits),
    ("reasons_are_true", served, _ready_and_waits),
    ("reasons_are_true", served, _cancelled_by_nobody),
    ("touches_its_own", served, _record_written_for_another_run),
    ("touches_its_own", served, _machine_deleted_for_another_run),
    ("sweeps_end", served, _sweep_that_never_ends),
]


@pytest.mark.parametrize(("rule", "story", "mutate"), MUTATIONS, ids=[m[2].__name__.strip("_") for m in MUTATIONS])
def test_a_broken_promise_is_reported(rule: str, story: Callable[[], Story], mutate: Callable[[Story], None]) -> None:
    mutated = story()
    mutate(mutated)
    assert rule in {problem.rule for problem in check(mutated.history())}


def test_every_rule_has_a_mutation() -> None:
    assert {rule.__name__ for rule in outcomes.RULES} | {"sweeps_end"} == {rule for rule, _, _ in MUTATIONS}


FAULTS: list[tuple[str, Callable[[], Story], Callable[[Story], None], dict[str, Any]]] = [
    ("cancel_is_prompt", cancelled, _cancel_without_effect_for_minutes, {"what": "restart"}),
    ("told_once", stopped, _notice_told_again, {"what": "refused", "process": "inspect-1"}),
    ("sweeps_end", served, _sweep_that_never_ends, {"what": "stalled", "process": "sweep-9", "seconds": 100.0}),
]


@pytest.mark.parametrize(("rule", "story", "mutate", "fault"), FAULTS, ids=[rule for rule, *_ in FAULTS])
def test_a_fault_at_that_time_excuses_the_delay(
    rule: str, story: Callable[[], Story], mutate: Callable[[Story], None], fault: dict[str, Any]
) -> None:
    mutated = story()
    mutate(mutated)
    before = [fact for fact in mutated.facts if fact.kind in ("cancel", "call") or "/notice/" in str(fact.data)][-1]
    mutated.facts.insert(mutated.facts.index(before) + 1, Fact(before.time, "fault", fault))
    assert rule not in {problem.rule for problem in check(mutated.history())}


def _call_for_another_run(story: Story) -> None:
    story.facts.insert(0, Fact(story.facts[0].time, "call", {"instance": "notify-1", "run": "other-0123456789ab"}))


def _first(story: Story, kind: str) -> Fact:
    return next(fact for fact in story.facts if fact.kind == kind)


def _write_of(story: Story, name: str) -> Fact:
    return next(fact for fact in story.facts if name in fact.data.get("name", ""))


def _state(fact: Fact) -> str:
    content = fact.data.get("content")
    return str(content.get("state", "")) if isinstance(content, dict) else ""


def _records(story: Story) -> Iterator[dict[str, Any]]:
    return (fact.data["content"] for fact in story.facts if fact.data.get("name", "").endswith("record.json"))


def _attempts(story: Story) -> Iterator[dict[str, Any]]:
    return (attempt for record in _records(story) for attempt in record["attempts"])


def _spec(story: Story, **changes: Any) -> None:
    _first(story, "dropped").data["spec"] = copy.deepcopy(SPEC) | changes


GAVE_UP = 'the workflow failed; {"tags":["HttpError"],"message":"HTTP server responded with error code 500"}'
NOT_REACHED = (
    'the workflow failed; {"message":"ConnectionError: http.post: ConnectionError","tags":["ConnectionError"]}'
)
BROKEN = 'the workflow failed; {"tags":["KeyError"],"message":"key not found: status"}'


@pytest.mark.parametrize(("message", "is_reported"), [(GAVE_UP, False), (NOT_REACHED, False), (BROKEN, True)])
def test_a_run_whose_workflow_gave_up_needs_no_retry(message: str, is_reported: bool) -> None:
    """As in seeds 301052 and 2004347: nine calls in a row failed. An error of the workflow itself is a defect."""
    story = stopped()
    _fail_as(story, "infrastructure", message)
    assert ("retries_are_counted" in {problem.rule for problem in check(story.history())}) is is_reported


def _fail_as(story: Story, error_class: str, message: str = "") -> None:
    """Set the class of every error in the record, and its message."""
    for record in _records(story):
        for error in [record["error"], *(attempt["error"] for attempt in record["attempts"])]:
            if error:
                error |= {"error_class": error_class} | ({"message": message} if message else {})


def _delay(story: Story, first: Fact, seconds: float) -> None:
    """Move a fact and all later facts by `seconds`."""
    at = story.facts.index(first)
    story.facts[at:] = [fact._replace(time=fact.time + seconds) for fact in story.facts[at:]]
    story.now += seconds


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


@pytest.mark.parametrize("fate", ["", "preempted", "code_error"])
@pytest.mark.parametrize("target", sorted(specs.TARGETS))
def test_a_life_without_faults_costs_exactly_what_it_uses(
    target: str, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = run_alone(specs.whole(target), Work(total=300.0, metric=0.9, fates=[fate]), seconds=7200)
    (life,) = [life for life in read(history).values() if life.records]
    attempts = life.last["attempts"]
    assert [attempt["number"] for attempt in attempts] == ([1, 2] if fate == "preempted" else [1])
    assert list(outcomes.cost_is_exact(life)) == []
    attempts[0]["ended"] = _iso(seconds_of(attempts[0]["ended"]) + 2 * outcomes.EXACT_SECONDS)
    monkeypatch.setattr(type(life), "last", {"attempts": attempts})
    assert len(list(outcomes.cost_is_exact(life))) == 1
