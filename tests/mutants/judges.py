"""The judges: the tests that may notice a mutant. They run in a process that loads the mutated code.

Every judge returns what noticed the mutant, or "". Only this process imports dropforge: from the mutated tree.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from .reach import WORKFLOWS, Reach, Recorder, TestsRecorder

if TYPE_CHECKING:
    from dropforge_local.chaos.history import History

# Folders whose tests take seconds: no stack, no training.
UNIT = ("stages", "endpoints", "run", "money", "spec", "tell", "platforms", "cloud", "base")
# Without a choice of simulations: so many of each kind. The focused ones try each aim of all targets once.
WILD, STRUCK, ENDPOINTS, VMS = 48, 48, 12, 24
EFFECTS = 600  # of a single run, at least


class Scope(NamedTuple):
    """The unit tests and the simulations, by name, that judge a mutant. No name means all of them.

    `record` is the file for the functions that they reach. `is_small` restricts the model to cancels.
    """

    tests: tuple[str, ...] = ()
    simulations: tuple[str, ...] = ()
    record: Path | None = None
    is_small: bool = False


Judge = Callable[[Scope], str]


def unit(scope: Scope) -> str:
    """The first unit test that fails."""
    failed, recorder = _Failed(), TestsRecorder(Path.cwd())
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "-W", "ignore"]
    options += ["--hypothesis-profile", "judge"]
    tests = scope.tests or (*WORKFLOWS.values(), *(f"tests/{folder}" for folder in UNIT))
    code = pytest.main([*options, *tests], plugins=[failed, *([recorder] if scope.record else [])])
    if scope.record:
        recorder.reach.write(scope.record)
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
    """The first promise that a simulation breaks."""
    reach, recorder = Reach(), Recorder(Path.cwd())
    for name in scope.simulations or simulations():
        began = time.process_time()
        simulate = simulation(name)
        with ExitStack() as stack:
            reach.simulations[name] = stack.enter_context(recorder.on()) if scope.record else []
            history = simulate()
        if problems := _checker(name)(history):
            return f"{name}: {problems[0]}"
        reach.seconds[name] = time.process_time() - began
    if scope.record:
        reach.write(scope.record)
    return ""


def simulations() -> tuple[str, ...]:
    """The names of all simulations, the kinds in turn: wild seeds, focused seeds, strikes of a single run, and lives of
    named endpoints, also on TPU VMs."""
    from dropforge_local.chaos.faults import STRIKES
    from dropforge_local.chaos.focus import aims
    from dropforge_local.chaos.specs import TARGETS

    draw, targets = random.Random(0), sorted(TARGETS)
    wild = [f"wild {number}" for number in range(WILD)]
    focused = [f"focused {number}" for number in range(len(aims(targets)))]
    struck = [f"struck {target} {draw.randint(1, EFFECTS)} {draw.choice(STRIKES)}" for target in targets * STRUCK]
    endpoints = [f"endpoints {number}" for number in range(ENDPOINTS)]
    vms = [f"vms {number}" for number in range(VMS)]
    kinds = (wild, focused, struck[:STRUCK], endpoints, vms)
    return tuple(name for names in zip_longest(*kinds) for name in names if name)


def simulation(name: str) -> Callable[[], History]:
    """The simulation of a name: "wild SEED", "focused SEED", "endpoints SEED", "vms SEED", or "struck TARGET EFFECT
    FAULT"."""
    from dropforge_local.chaos import endpoint_lives
    from dropforge_local.chaos.faults import Strike
    from dropforge_local.chaos.simulation import run, run_focused, run_struck

    kind, *rest = name.split(" ")
    if kind == "struck":
        target, effect, fault = rest
        return partial(run_struck, Strike(int(effect), fault), target)
    if kind == "vms":
        return partial(endpoint_lives.run, int(rest[0]), endpoint_lives.VMS)
    return partial({"wild": run, "focused": run_focused, "endpoints": endpoint_lives.run}[kind], int(rest[0]))


def _checker(name: str) -> Callable[[History], Sequence[object]]:
    """The rules that the history of a simulation must keep."""
    from dropforge_local.chaos import checker, endpoint_rules

    return endpoint_rules.check if name.startswith(("endpoints ", "vms ")) else checker.check


JUDGES: dict[str, Judge] = {"unit": unit, "chaos": chaos, "model": model}


class _Failed:
    """A plugin of pytest that keeps the first failure."""

    test = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test = f"{report.nodeid} (not collected)"
