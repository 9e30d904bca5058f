"""Focused lives: their strikes hit the state that the seed chooses, and most of their runs reach an endpoint."""

from __future__ import annotations

from click.testing import CliRunner

from dropforge_cli.main import cli
from dropforge_local.chaos.checker import check
from dropforge_local.chaos.focus import FAULTS, STATES, Aim, aims, cell_of, coverage, serves
from dropforge_local.chaos.simulation import run_focused
from dropforge_local.chaos.specs import TARGETS

LIVES = 16
LOST_LONG_AGO = 400896  # Kubernetes shows the pod of the lost machine for six minutes


def test_a_machine_that_kubernetes_misses_late_may_be_charged_until_then() -> None:
    assert list(check(run_focused(LOST_LONG_AGO))) == []


def test_focused_seeds_keep_every_promise_and_half_of_them_serve() -> None:
    histories = [run_focused(seed) for seed in range(LIVES)]
    problems = [f"seed {seed}: {problem}" for seed, history in enumerate(histories) for problem in check(history)]
    assert problems == []
    assert sum(map(serves, histories)) >= LIVES / 2
    struck = [cell for history in histories if (cell := cell_of(history))]
    assert len(struck) >= LIVES / 2
    aimed = sum(cell == aim for cell, aim in zip(map(cell_of, histories), aims(tuple(TARGETS)), strict=False))
    assert aimed >= LIVES / 4  # the run may leave the state between the aim and the strike


def test_the_aims_are_every_combination_and_each_round_of_seeds_has_all() -> None:
    every = aims(tuple(TARGETS))
    assert len(every) == len(set(every)) == len(TARGETS) * len(STATES) * len(FAULTS)
    assert {aim.target for aim in aims(("ray",))} == {"ray"}
    assert run_focused(3).digest == run_focused(3).digest != run_focused(3 + len(every)).digest


def test_the_coverage_names_the_cells_that_were_never_struck() -> None:
    every = aims(("ray",))
    text = coverage([*every[1:], every[1], None], ("ray",))
    assert text.splitlines()[0] == f"{len(every) - 1} of {len(every)} cells (target, state, fault) were struck"
    assert text.splitlines()[1:] == [f"  never struck: {', '.join(every[0])}"]
    assert "and 119 more" in coverage([Aim("ray", "TRAINING", "late")], ("ray", "gke"))


def test_the_command_prints_the_coverage_and_replays_a_focused_seed() -> None:
    many = CliRunner().invoke(cli, ["chaos", "--focused", "--seeds", "2", "--target", "cloud_run"])
    assert many.exit_code == 0, many.output
    assert "of 66 cells (target, state, fault) were struck" in many.output
    replayed = CliRunner().invoke(cli, ["chaos", "--focused", "--seed", "3"])
    assert f"--seed 3 --focused: {len(run_focused(3).facts)} facts of 1 runs" in replayed.output
