"""Simulations: random seeds, seeds that once revealed a defect, and single faults at the effects of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from dropforge_cli.main import cli
from dropforge_local.chaos.checker import check, hostile_does_nothing
from dropforge_local.chaos.faults import STRIKES, Strike
from dropforge_local.chaos.history import History
from dropforge_local.chaos.hostile import ACTS
from dropforge_local.chaos.simulation import run, run_beside_hostile, run_struck
from dropforge_local.chaos.specs import TARGETS
from dropforge_local.chaos.trainer import Container, Trainer, _Attempt

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 5  # simulations for each fault and target; a single fault strikes each simulation
# Seeds that revealed a defect, and the targets of their runs; docs/measurements.md describes each defect.
SERVERLESS = ("cloud_run", "tpu_vm")
DEFECTS = {
    (140, SERVERLESS): "a run whose cancel was recorded while its last attempt failed ended FAILED",
    (179, SERVERLESS): "a run whose cancel was recorded while its last attempt failed ended FAILED (second seed)",
    (190, SERVERLESS): "a stalled inspect ended an attempt of a finished run",
    (784, SERVERLESS): "a job that was deleted during its inspection made the inspection fail, and the run waited",
    (1176, SERVERLESS): "a stalled provision recorded a job as gone that another provision had created",
    (11121, SERVERLESS): "a machine cost money after training until another machine served",
    (
        20949,
        SERVERLESS,
    ): "a stalled deploy recorded an endpoint as ready after its end, and the run succeeded with it",
    (5665, SERVERLESS): "the record of an endpoint on the training VM had a later expiry than the label of the machine",
    (126, ("ray",)): "pods without their Ray cluster continued after the end of their run",
    (
        1073,
        ("gke",),
    ): "the stuck time of an attempt without job events counted from the time when its first node waited",
    (
        8150,
        tuple(TARGETS),
    ): "a run that was cancelled while its cluster was created paid for the deletion of the cluster",
    (2522, tuple(TARGETS)): "a slow inspection ended the attempt after its own",
    (335, ("ray",)): "the cost did not include hosts that waited for the head of their Ray cluster",
    (
        81016,
        tuple(TARGETS),
    ): "a sweep gave up on a Deployment before it requested the deletion, as the first inspection took minutes",
    (
        233,
        tuple(TARGETS),
    ): "a warning became due during an inspection, after its search for due warnings: it waited a check interval",
    (277, tuple(TARGETS)): "an attempt that waited until its deadline was charged for all of that time",
    (503895, tuple(TARGETS)): "a node that a call created late held the disk of its attempt, so its run never ended",
    (502874, tuple(TARGETS)): "the checker missed a job that a call created late and its attempt then found",
    (503333, tuple(TARGETS)): "the checker missed a stall that began while another stall lasted",
    (
        2004605,
        tuple(TARGETS),
    ): "the checker charged an attempt that was cancelled while it waited from its start, not from its last wait",
    (4004574, tuple(TARGETS)): "the checker did not know that an ended attempt can commit the model of the run",
    (1900248, ("tpu_vm",)): "an attempt whose only sign was one point of its series was never stuck",
    (341, ("gke",)): "a stalled teardown of an attempt deleted the cluster of the next one",
    (90, tuple(TARGETS)): "the cost did not include the minutes of a machine that started while provision stalled",
}


@pytest.mark.parametrize("first", range(0, 80, 10))
def test_seeds_keep_every_promise(first: int) -> None:
    problems = [f"seed {seed}: {problem}" for seed in range(first, first + 10) for problem in check(run(seed))]
    assert problems == []


@pytest.mark.parametrize(("seed", "targets"), DEFECTS)
def test_seeds_that_revealed_a_defect_keep_every_promise(seed: int, targets: tuple[str, ...]) -> None:
    assert [str(problem) for problem in check(run(seed, targets))] == []


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("fault", STRIKES)
def test_no_single_fault_breaks_a_promise(fault: str, target: str) -> None:
    """Strike a sample of the effects of a run, a different sample for each fault.

    `dropforge chaos --each` strikes all effects.
    """
    effects = effects_of_a_calm_run(target)
    struck = range(1 + STRIKES.index(fault), effects + 1, effects // SAMPLES)
    results = ((at, check(run_struck(Strike(at, fault), target))) for at in struck)
    assert [f"{fault} at {at}: {problem}" for at, problems in results for problem in problems] == []


@cache
def effects_of_a_calm_run(target: str) -> int:
    """How many effects the run has if no fault strikes it: a strike at effect 0 never comes."""
    return int(next(run_struck(Strike(0, ""), target).of("calm")).data["effects"])


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_hostile_trainer_changes_nothing_of_another_run(target: str, bounded: bool) -> None:
    """The honest run has the same states at the same times as beside an honest trainer, and both succeed.

    Without a boundary of its token, the trainer only forges objects: proofs make a forgery visible.
    """
    beside_hostile, beside_honest = (
        run_beside_hostile(target, hostile=hostile, bounded=bounded) for hostile in (True, False)
    )
    acts = list(beside_hostile.of("hostile"))
    assert len(acts) == ACTS
    assert {act.data["victim"] for act in acts} == {second_run(beside_honest)}
    assert check(beside_hostile) == []
    assert states(beside_hostile) == states(beside_honest)
    assert set(states(beside_hostile).values()) == {"SUCCEEDED"}


def second_run(history: History) -> str:
    return str([fact.data["run"] for fact in history.of("dropped")][1])


def states(history: History) -> dict[str, str]:
    """The last state of each run, and its number of attempts."""
    records = [fact.data["content"] for fact in history.of("write") if is_record(fact.data["name"])]
    assert all(len(record["attempts"]) <= 1 for record in records)
    return {record["run"]: record["state"] for record in records}


def is_record(name: str) -> bool:
    return name.startswith("runs/") and name.endswith("/record.json")


def test_the_checker_finds_a_boundary_that_is_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A boundary that allows everything lets hostile containers destroy what other runs have written."""
    monkeypatch.setattr("dropforge_local.iam.boundary.Boundary.allows", lambda *_: True)
    found = [text for seed in (2, 12) for _, text in hostile_does_nothing(run(seed))]
    assert {text.split()[2] for text in found} >= {"create", "delete"}


def test_the_checker_finds_a_forged_event_that_was_kept() -> None:
    for name in (
        "runs/job-0123456789ab/events/0001-100000000000007-failed.json",
        "runs/unknown-fedcba987654/record.json",
    ):
        history = History(0)
        history.add(1.0, "write", {"name": name})
        assert list(hostile_does_nothing(history))


HOSTS = {"gke": (171, 191), "ray": (49, 1441)}  # seeds in which a host fails while the others wait for it


@pytest.mark.parametrize("target", sorted(HOSTS))
def test_one_host_that_fails_ends_its_attempt(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing ended the other hosts, the rule would say so."""
    for seed in HOSTS[target]:
        history = run(seed, [target])
        assert [fact for fact in history.of("fault") if fact.data["what"] == "host_failed"]
        assert [str(problem) for problem in check(history)] == []
    start, fail = Trainer.start, _Attempt._fail_a_host

    def start_patient(trainer: Trainer, container: Container) -> None:
        start(trainer, replace(container, fail=lambda code: None))

    monkeypatch.setattr(Trainer, "start", start_patient)
    monkeypatch.setattr(_Attempt, "_fail_a_host", lambda attempt, error_class: fail(attempt, ""))
    rules = {problem.rule for seed in HOSTS[target] for problem in check(run(seed, [target]))}
    assert "one_host_ends_all" in rules


def test_a_seed_has_the_same_history_in_another_process() -> None:
    here = run(7)
    assert run(7).digest == here.digest != run(8).digest
    code = "from dropforge_local.chaos.simulation import run; print(run(7).digest)"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=100
        )
        assert done.stdout.strip() == here.digest, done.stderr


def test_the_command_counts_seeds_and_replays_a_seed() -> None:
    many = CliRunner().invoke(cli, ["chaos", "--seeds", "3"])
    assert many.exit_code == 0, many.output
    assert "3 simulations, 0 with broken promises" in many.output
    replayed = CliRunner().invoke(cli, ["chaos", "--seed", "1", "--target", "tpu_vm", "--verbose"])
    assert f"digest {run(1, ['tpu_vm']).digest}" in replayed.output
    assert "dropped" in replayed.output
    struck = CliRunner().invoke(cli, ["chaos", "--each", "--target", "gke", "--target", "ray"])
    assert (struck.exit_code, "gke, ray: --strike and --each run one target" in struck.output) == (2, True)


FAULTS = {"refused", "lost", "late", "stalled", "killed", "dropped", "restart", "deleted", "repeated"}
FAULTS |= {"silent", "lost_machine", "stuck"}
KINDS = {"Job", "Service", "QueuedResource", "Node", "Disk", "Cluster", "Pod", "RayJob", "Deployment"}
STATES = {"SUCCEEDED", "FAILED", "CANCELLED", "REJECTED"}
RICH = (6, 79, 65, 106, 8)  # together, these seeds contain all of it; after a change of the cloud they may not


def test_seeds_contain_every_fault_kind_and_terminal_state() -> None:
    """A hundred seeds contain every fault, every kind of resource and every terminal state."""
    missing = FAULTS | KINDS | STATES
    for seed in (*RICH, *range(40, 140)):
        facts = run(seed).facts
        missing -= {fact.data["what"] for fact in facts if fact.kind == "fault"}
        missing -= {fact.data["type"].split("/")[1] for fact in facts if fact.kind == "created"}
        written = [fact.data for fact in facts if fact.kind == "write" and "record" in fact.data["name"]]
        missing -= {data["content"]["state"] for data in written}
        if not missing:
            return
    assert missing == set()
