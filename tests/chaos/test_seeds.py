"""Lives in the simulated cloud: seeds, those that have found something, and each fault at each effect of one run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dropforge_cli.main import cli
from dropforge_local.chaos.checker import check
from dropforge_local.chaos.faults import STRIKES, Strike
from dropforge_local.chaos.simulation import run, run_struck
from dropforge_local.chaos.specs import TARGETS

ROOT = Path(__file__).resolve().parents[2]
LIVES = 5  # of those that one fault strikes, for each fault and target
# Seeds that found a defect, by the targets of their runs; docs/measurements.md describes each defect.
SERVERLESS = ("cloud_run", "tpu_vm")
FOUND = {
    (140, SERVERLESS): "a run whose cancel was recorded while its last attempt failed ended FAILED",
    (179, SERVERLESS): "likewise",
    (190, SERVERLESS): "an inspect that had stalled ended an attempt of a run that was over",
    (784, SERVERLESS): "a job that was deleted while it was looked at made the look fail, and the run wait",
    (1176, SERVERLESS): "a provision that had stalled noted a job as gone that another one had made",
    (11121, SERVERLESS): "a machine that had trained was paid for until another one served",
    (
        20949,
        SERVERLESS,
    ): "a deploy that had stalled found the endpoint ready after its end, and the run succeeded with it",
    (5665, SERVERLESS): "a machine that was kept to serve was said to be there for longer than its label had it",
    (126, ("ray",)): "pods that had lost their Ray cluster went on when their run was over",
    (1073, ("gke",)): "an attempt of which nothing was heard was said to be stuck from when its first node waited",
    (335, ("ray",)): "hosts that waited for the head of their Ray cluster cost nothing by our sum",
    (
        81016,
        tuple(TARGETS),
    ): "a sweep gave up a Deployment whose first look took minutes before it had asked for its end",
}


@pytest.mark.parametrize("first", range(0, 80, 10))
def test_seeds_keep_every_promise(first: int) -> None:
    problems = [f"seed {seed}: {problem}" for seed in range(first, first + 10) for problem in check(run(seed))]
    assert problems == []


@pytest.mark.parametrize(("seed", "targets"), FOUND)
def test_a_seed_that_found_a_defect_keeps_every_promise_now(seed: int, targets: tuple[str, ...]) -> None:
    assert [str(problem) for problem in check(run(seed, targets))] == []


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("fault", STRIKES)
def test_no_single_fault_breaks_a_promise(fault: str, target: str) -> None:
    """Some of the effects of a run, others for each fault; `dropforge chaos --each` strikes them all."""
    calm = next(run_struck(Strike(0, fault), target).of("calm"))
    effects = calm.data["effects"]
    struck = range(1 + STRIKES.index(fault), effects + 1, effects // LIVES)
    lives = ((at, check(run_struck(Strike(at, fault), target))) for at in struck)
    assert [f"{fault} at {at}: {problem}" for at, problems in lives for problem in problems] == []


def test_a_seed_is_the_same_life_in_another_process() -> None:
    here = run(7)
    assert run(7).digest == here.digest != run(8).digest
    code = "from dropforge_local.chaos.simulation import run; print(run(7).digest)"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=100
        )
        assert done.stdout.strip() == here.digest, done.stderr


def test_the_command_counts_seeds_and_replays_one() -> None:
    many = CliRunner().invoke(cli, ["chaos", "--seeds", "3"])
    assert many.exit_code == 0, many.output
    assert "3 simulations, 0 with broken promises" in many.output
    one = CliRunner().invoke(cli, ["chaos", "--seed", "1", "--target", "tpu_vm", "--verbose"])
    assert f"digest {run(1, ['tpu_vm']).digest}" in one.output
    assert "dropped" in one.output
    struck = CliRunner().invoke(cli, ["chaos", "--each", "--target", "gke", "--target", "ray"])
    assert (struck.exit_code, "gke, ray: --strike and --each run one target" in struck.output) == (2, True)


FAULTS = {"refused", "lost", "late", "stalled", "killed", "dropped", "restart", "deleted", "repeated"}
FAULTS |= {"silent", "lost_machine", "stuck"}
MADE = {"Job", "Service", "QueuedResource", "Node", "Disk", "Cluster", "Pod", "RayJob", "Deployment"}
ENDS = {"SUCCEEDED", "FAILED", "CANCELLED", "REJECTED"}


def test_seeds_are_full_of_faults() -> None:
    """Not a cloud in which nothing happens: all that can go wrong, be made, and come of it is drawn before long."""
    missing = FAULTS | MADE | ENDS
    for seed in range(40, 140):
        facts = run(seed).facts
        missing -= {fact.data["what"] for fact in facts if fact.kind == "fault"}
        missing -= {fact.data["type"].split("/")[1] for fact in facts if fact.kind == "created"}
        written = [fact.data for fact in facts if fact.kind == "write" and "record" in fact.data["name"]]
        missing -= {data["content"]["state"] for data in written}
        if not missing:
            return
    assert missing == set()
