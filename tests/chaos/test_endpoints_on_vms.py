"""Lives of names on TPU VMs: rollouts, lost machines and changed records with random faults keep every promise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle
from typing import Any

import pytest

from dropforge.cloud import dns, tpu
from dropforge.endpoints.record import Revision
from dropforge.platforms.tpu_vm import named
from dropforge.platforms.tpu_vm.named import NamedTpuVms
from dropforge.stages.rollout import advance
from dropforge.stages.sweep import named as swept
from dropforge_local.chaos.dns import Dns
from dropforge_local.chaos.endpoint_lives import VMS, run, run_struck
from dropforge_local.chaos.endpoint_rules import check
from dropforge_local.chaos.faults import STRIKES, Strike
from dropforge_local.chaos.history import History

FAULTS = [fault for fault in STRIKES if fault != "cancel"]
# Seeds that revealed a defect; docs/measurements.md describes it.
DEFECTS = {
    5: "nobody replaced a machine that a user had deleted",
    29: "nobody replaced a machine that was preempted",
    56: "nobody mended a record that a user had deleted",
    1233: "a call that was overtaken deleted the machine of the next rollout",
    1264: "a call that was overtaken ended the costs of a machine that served",
    92: "the name got the address of a machine that had never answered",
    81000265: "the first revision of a name was promoted after its budget had suspended the name, and cost money",
}


@pytest.mark.parametrize("first", range(0, 16, 4))
def test_lives_of_names_on_vms_keep_every_promise(first: int) -> None:
    problems = [f"seed {seed}: {problem}" for seed in range(first, first + 4) for problem in check(run(seed, VMS))]
    assert problems == []


def test_no_name_is_suspended_while_its_first_rollout_moves_it() -> None:
    written = [
        fact.data for fact in run(81000265, VMS).of("write") if fact.data["name"] == "endpoints/budgeted/record.json"
    ]
    moving = [
        write["content"]
        for write in written
        if any(rollout["state"] == "SHIFTING" for rollout in write["content"]["rollouts"])
    ]
    assert moving
    assert [record["suspended"] for record in moving if record["suspended"]] == []


@pytest.mark.parametrize("seed", DEFECTS)
def test_lives_that_revealed_a_defect_keep_every_promise(seed: int) -> None:
    assert check(run(seed, VMS)) == []


def test_one_fault_at_any_moment_breaks_no_promise() -> None:
    """A life with two models, a preempted machine, a budget that is spent, and the end of the name."""
    calm = run_struck(Strike(0, ""))
    assert check(calm) == []
    effects = next(calm.of("calm")).data["effects"]
    strikes = [Strike(effect, fault) for effect, fault in zip(range(1, effects, 47), cycle(FAULTS), strict=False)]
    problems = [f"{strike}: {problem}" for strike in strikes for problem in check(run_struck(strike))]
    assert problems == []


@pytest.mark.parametrize("harm", ["stray", "unname"])
def test_a_rollout_survives_that_a_user_changes_or_deletes_the_record_at_the_same_moment(
    monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """Cloud DNS refuses the change of dropforge, which reads the record again."""
    changes: list[int] = []
    request = Dns.request

    def seen(zone: Dns, verb: str, *arguments: Any, **about: Any) -> Any:
        changes.extend([zone.world.effects + 1] if verb == "POST" else [])
        return request(zone, verb, *arguments, **about)

    with monkeypatch.context() as patch:
        patch.setattr(Dns, "request", seen)
        run_struck(Strike(0, ""))
    assert len(changes) == 6, "two models, a replaced machine, a suspension, a new start, the end"
    _, second, replaced, suspended, _, retired = changes  # where there is a record that a user can change
    for effect in (second, replaced, suspended, retired):
        life = run_struck(Strike(effect, harm))
        assert list(life.of("strayed"))
        assert check(life) == []
        ends = [each["state"] for each in records(life)[-1]["rollouts"]]
        assert "ROLLED_BACK" not in ends


def records(life: History) -> list[dict[str, Any]]:
    return [fact.data["content"] for fact in life.of("write") if fact.data["name"] == "endpoints/budgeted/record.json"]


def test_a_life_repeats() -> None:
    assert run(3, VMS).digest == run(3, VMS).digest


def _keeps_names(change: Callable[..., bool]) -> Callable[..., bool]:
    """A change of a record that deletes none."""

    def changed(cloud: Any, record: str, read: Any, address: str) -> bool:
        return change(cloud, record, read, address) if address else True

    return changed


RULES = (
    "a_name_gets_the_address_of_a_checked_machine",
    "no_machine_ends_before_its_name",
    "the_machine_before_finishes_its_answers",
    "a_name_always_answers",
    "a_lost_name_comes_back",
    "a_machine_that_nobody_needs_ends",
    "nothing_is_left_of_a_name",
    "the_record_has_the_most_that_its_machines_cost",
)
CHECKED, NAMED_FIRST, DRAINED, ANSWERS, BACK, ENDS, LEFT, COST = RULES


def _moves_nothing(*_: Any) -> bool:
    return True


# The broken part, the rule, and seeds: the rule must report one of these lives. The shortest life comes first.
BREAKAGES: list[tuple[str, Any, str, Any, str, tuple[int, ...]]] = [
    ("no completion is wanted", advance, "completion_problem", lambda *_: "", CHECKED, (5, 2, 8)),
    ("what never answered is undone as usual", advance, "_is_alone", lambda *_: False, CHECKED, (17,)),
    ("names of the ended stay", dns, "change_record", _keeps_names(dns.change_record), NAMED_FIRST, (5, 2, 8)),
    ("the machine before ends at once", NamedTpuVms, "drain_seconds", lambda *_: 0, DRAINED, (5, 2, 8)),
    ("a promotion moves nothing", NamedTpuVms, "shift", _moves_nothing, ANSWERS, (8, 2, 5)),
    ("no machine is replaced", swept, "_restore", lambda *_: "", BACK, (5, 56)),
    ("a lost machine is not seen", named, "_node", tpu.find_node, BACK, (8,)),
    ("nothing is pruned", NamedTpuVms, "prune", lambda *_: None, ENDS, (5, 2, 8)),
    ("a promotion moves nothing in the end", NamedTpuVms, "shift", _moves_nothing, LEFT, (8, 2, 5)),
    ("no machine costs money", Revision, "paid", lambda self, _: self, COST, (5, 2, 8)),
]


@pytest.mark.parametrize(
    ("owner", "name", "broken", "rule", "seeds"), [each[1:] for each in BREAKAGES], ids=[each[0] for each in BREAKAGES]
)
def test_the_rules_notice_a_broken_promise(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Any, rule: str, seeds: tuple[int, ...]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    assert any(problem.startswith(rule) for seed in seeds for problem in problems_of(seed, broken))


@cache
def problems_of(seed: int, broken: Any) -> list[str]:
    """The problems of a life while `broken` is in its place. Two rules look at the same life, which takes long."""
    return check(run(seed, VMS))


def test_every_rule_notices_something() -> None:
    assert {rule for *_, rule, _ in BREAKAGES} == set(RULES)
