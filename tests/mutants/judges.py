"""The judges: the tests that may notice a mutant. They run in a process that loads the mutated code.

Every judge returns what noticed the mutant, or "". Only this process imports dropforge: from the mutated tree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from dropforge_local.chaos.history import History

# Folders whose tests take seconds: no stack, no training. A mutant's own folder comes first.
UNIT = ("stages", "run", "money", "tell", "platforms", "cloud", "base")
# Tests of the workflow's text with mocked calls.
WORKFLOW = "tests/contract/test_run_workflow.py"
# The targets that use a file, by a part of its path.
OF_TARGETS = {
    "platforms/cloud_run": ("cloud_run",),
    "platforms/gke/serve": ("gke", "ray"),
    "platforms/gke": ("gke",),
    "platforms/ray": ("ray",),
    "platforms/tpu_vm": ("tpu_vm",),
    "cloud/tpu": ("tpu_vm",),
    "cloud/disks": ("tpu_vm", "gke"),
    "cloud/kubernetes": ("gke", "ray"),
    "cloud/pods": ("gke", "ray"),
}


class Scope(NamedTuple):
    """How thoroughly to judge: the mutated file, the simulations, and the files of unit tests (none: all of UNIT)."""

    file: str
    seeds: int
    tests: tuple[str, ...] = ()
    is_small: bool = False  # the model of a cancel only


Judge = Callable[[Scope], str]


def unit(scope: Scope) -> str:
    """The first unit test that fails."""
    failed = _Failed()
    every = sorted([WORKFLOW, *(f"tests/{folder}" for folder in UNIT)], key=lambda path: -_likeness(path, scope.file))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "-W", "ignore"]
    code = pytest.main([*options, *(scope.tests or every)], plugins=[failed])
    return failed.test or ("" if code == pytest.ExitCode.OK else f"pytest ended with {code!r}")


def model(scope: Scope) -> str:
    """The first broken rule in the model of a run with a cancel, then in the model of a run with one fault."""
    from dropforge_local.chaos.model import Explorer

    for faults, cancel in ((0, True), (1, False))[: 1 if scope.is_small else 2]:
        explorer = Explorer(faults, cancel)
        explorer.explore()
        if explorer.problems:
            return explorer.problems[0][1]
    return ""


def chaos(scope: Scope) -> str:
    """The first promise that a simulation breaks; each simulation is a seed, or one strike of a single run."""
    from dropforge_local.chaos.checker import check

    for name, simulate in _simulations(scope.file, scope.seeds):
        if problems := check(simulate()):
            return f"{name}: {problems[0]}"
    return ""


def _simulations(file: str, count: int) -> Iterator[tuple[str, Callable[[], History]]]:
    """Seeds of all targets; of the file's targets, wild and focused; and strikes of a run on them, in turn."""
    from dropforge_local.chaos.faults import STRIKES, Strike
    from dropforge_local.chaos.simulation import run, run_focused, run_struck
    from dropforge_local.chaos.specs import TARGETS

    targets = _targets(file, tuple(sorted(TARGETS)))
    effects = {target: run_struck(Strike(0, STRIKES[0]), target).facts[-1].data["effects"] for target in targets}
    draw = random.Random(0)
    for number in range(count):
        target = targets[number // 4 % len(targets)]
        strike = Strike(draw.randint(1, effects[target]), draw.choice(STRIKES))
        yield (
            (f"seed {number}", partial(run, number)),
            (f"seed {number} of {target}", partial(run, number, (target,))),
            (f"focused seed {number} of {target}", partial(run_focused, number, (target,))),
            (f"strike {strike.effect}:{strike.fault} of {target}", partial(run_struck, strike, target)),
        )[number % 4]


JUDGES: dict[str, Judge] = {"unit": unit, "model": model, "chaos": chaos}


class _Failed:
    """A plugin of pytest that keeps the first failure."""

    test = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test = f"{report.nodeid} (not collected)"


def _targets(file: str, every: tuple[str, ...]) -> tuple[str, ...]:
    """The targets that use a file: those in its path, those that share its client, or all."""
    for part, targets in OF_TARGETS.items():
        if part in file:
            return targets
    return every


def _likeness(path: str, file: str) -> int:
    """How many parts of a mutated file's path the path of its tests shares."""
    return len(set(file.removesuffix(".py").split("/")) & set(path.split("/")))
