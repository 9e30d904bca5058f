"""Each rule of names on TPU VMs reports histories that break it: each mutation breaks the history of a good life."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from dropforge_local.chaos import vm_rules
from dropforge_local.chaos.endpoint_lives import BUDGETED, SCRIPT, run_struck
from dropforge_local.chaos.endpoint_rules import check
from dropforge_local.chaos.faults import Strike
from dropforge_local.chaos.history import Fact, History

NODES = "projects/chaos-project/locations/us-central1-a/nodes/"


@pytest.fixture(scope="module")
def life() -> History:
    """A life without a fault in which the endpoint serves a model, and then another one to the end."""
    return run_struck(Strike(0, ""), SCRIPT[:2], float("inf"))


def moves(history: History) -> list[Fact]:
    """The changes of the name's address."""
    return [fact for fact in history.of("pointed") if fact.data["endpoint"] == BUDGETED]


def shown(history: History) -> dict[str, Any]:
    services: dict[str, Any] = next(history.of("end")).data["services"]
    return services


def about(history: History, kind: str, machine: str) -> Fact:
    """The first fact of a kind about a machine."""
    return next(fact for fact in history.of(kind) if fact.data.get("name") == NODES + machine)


def insert(history: History, fact: Fact) -> None:
    place = next(number for number, other in enumerate(history.facts) if other.time > fact.time)
    history.facts.insert(place, fact)


def machines(history: History) -> list[str]:
    """The machines to which the name has pointed, in order."""
    return [fact.data["machine"] for fact in moves(history)]


def _the_name_gets_the_address_of_nothing(history: History) -> None:
    moves(history)[1].data["address"] = "10.0.9.9"


def _a_machine_has_not_answered(history: History) -> None:
    second = machines(history)[1]
    history.facts = [fact for fact in history.facts if fact.kind != "answered" or fact.data["revision"] != second]


def _a_machine_answers_only_after_the_move(history: History) -> None:
    second = machines(history)[1]
    _a_machine_has_not_answered(history)
    data = {"endpoint": BUDGETED, "revision": second}
    insert(history, Fact(moves(history)[1].time + 1, "answered", data))


def _the_name_gets_the_address_of_a_machine_that_was_deleted(history: History) -> None:
    first, last = moves(history)
    insert(history, first._replace(time=last.time + 4000))


def _the_name_gets_the_address_of_a_machine_that_was_lost(history: History) -> None:
    lost = {"what": "preempted", "resource": NODES + machines(history)[1]}
    insert(history, Fact(moves(history)[1].time - 5, "fault", lost))


def _a_machine_is_deleted_under_its_name(history: History) -> None:
    insert(history, Fact(moves(history)[1].time + 10, "deleting", {"name": NODES + machines(history)[1], "by": "x"}))


def _the_machine_before_is_deleted_at_once(history: History) -> None:
    deletion = about(history, "deleting", machines(history)[0])
    history.facts.remove(deletion)
    insert(history, deletion._replace(time=moves(history)[1].time + 200))


def _the_name_is_taken_away(history: History) -> None:
    fact = moves(history)[1]
    insert(history, Fact(fact.time + 100, "pointed", {"endpoint": BUDGETED, "address": "", "machine": ""}))


def _a_machine_is_never_replaced(history: History) -> None:
    """It is lost after the last fault, and nothing follows."""
    calm = next(history.of("calm")).time
    lost = {"what": "preempted", "resource": NODES + machines(history)[1]}
    insert(history, Fact(calm + 1, "fault", lost))


def _a_machine_of_no_rollout_stays(history: History) -> None:
    first = about(history, "created", machines(history)[0])
    data = {**first.data, "name": first.data["name"].replace("df-r", "df-r9")}
    insert(history, first._replace(time=moves(history)[1].time + 1000, data=data))


def _the_name_points_elsewhere_in_the_end(history: History) -> None:
    shown(history)[BUDGETED]["serves"] = machines(history)[0]


def _nothing_exists_in_the_end(history: History) -> None:
    del shown(history)[BUDGETED]


def _another_machine_exists_in_the_end(history: History) -> None:
    shown(history)[BUDGETED]["resources"].append(NODES + machines(history)[0])


def _a_retired_endpoint_has_a_machine(history: History) -> None:
    records = [fact for fact in history.of("write") if fact.data["name"] == f"endpoints/{BUDGETED}/record.json"]
    last = records[-1].data["content"]
    last["retired"], last["stable"] = last["created"], 0


def _a_machine_costs_before_the_record_says(history: History) -> None:
    for fact in history.of("write"):
        if fact.data["name"] == f"endpoints/{BUDGETED}/record.json":
            for revision in fact.data["content"]["revisions"]:
                revision["usd_per_hour"] /= 2


MUTATIONS: list[tuple[str, Callable[[History], None]]] = [
    ("a_name_gets_the_address_of_a_checked_machine", _the_name_gets_the_address_of_nothing),
    ("a_name_gets_the_address_of_a_checked_machine", _a_machine_has_not_answered),
    ("a_name_gets_the_address_of_a_checked_machine", _a_machine_answers_only_after_the_move),
    ("a_name_gets_the_address_of_a_checked_machine", _the_name_gets_the_address_of_a_machine_that_was_deleted),
    ("a_name_gets_the_address_of_a_checked_machine", _the_name_gets_the_address_of_a_machine_that_was_lost),
    ("no_machine_ends_before_its_name", _a_machine_is_deleted_under_its_name),
    ("the_machine_before_finishes_its_answers", _the_machine_before_is_deleted_at_once),
    ("a_name_always_answers", _the_name_is_taken_away),
    ("a_name_always_answers", _a_machine_is_deleted_under_its_name),
    ("a_lost_name_comes_back", _a_machine_is_never_replaced),
    ("a_machine_that_nobody_needs_ends", _a_machine_of_no_rollout_stays),
    ("nothing_is_left_of_a_name", _the_name_points_elsewhere_in_the_end),
    ("nothing_is_left_of_a_name", _nothing_exists_in_the_end),
    ("nothing_is_left_of_a_name", _another_machine_exists_in_the_end),
    ("nothing_is_left_of_a_name", _a_retired_endpoint_has_a_machine),
    ("the_record_has_the_most_that_its_machines_cost", _a_machine_costs_before_the_record_says),
]


def test_the_unchanged_life_is_good(life: History) -> None:
    assert check(life) == []
    assert all(before.time < after.time for before, after in pairwise(moves(life)))


@pytest.mark.parametrize(("rule", "mutate"), MUTATIONS, ids=[f"{rule}-{each.__name__}" for rule, each in MUTATIONS])
def test_a_broken_promise_is_reported(life: History, rule: str, mutate: Callable[[History], None]) -> None:
    mutated = copy.deepcopy(life)
    mutate(mutated)
    assert rule in {problem.partition(":")[0] for problem in check(mutated)}


def test_every_rule_has_a_mutation() -> None:
    assert {rule.__name__ for rule in vm_rules.RULES} == {rule for rule, _ in MUTATIONS}
