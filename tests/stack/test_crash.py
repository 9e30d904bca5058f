"""A sample of the deaths that `make crash` tries: one commit of each case, drawn with a fixed seed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import requests
from tests.patience import PATIENCE_SECONDS

from dropforge_local.stack import control as local
from dropforge_local.stack.config import StackError
from dropforge_local.stack.crash import VARIABLE

from .conftest import user_of
from .crash import Case, Harness, Result, Tried, table
from .test_faults import kill
from .zygote import Zygote

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SEED = 8
FEWEST = 50  # the number of commits of the shortest life in CASES
CASES = [
    Case("cloud_run", "serving", "stack", "before"),
    Case("cloud_run", "failure", "stack", "after"),
    Case("cloud_run", "success", "functions"),
    Case("gke", "preempted", "stack", "after"),
    Case("gke", "serving", "containers"),
    Case("tpu_vm", "success", "stack", "before"),
]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[Harness]:
    with patch.dict(os.environ), patch.object(local, "_spawn", zygote.spawn):
        harness = Harness(tmp_path_factory.mktemp("crash"))
        yield harness
        harness.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.target}-{case.life}-{case.kill}-{case.moment}")
def test_after_a_death_nothing_is_lost_left_over_or_doubled(harness: Harness, case: Case) -> None:
    commit = random.Random(f"{SEED} {case}").randint(1, FEWEST)
    result = harness.attempt(case, commit)
    assert result.killed
    assert not result.problems, f"at commit {commit}: {result.problems}"


def test_a_forked_stack_has_its_own_session_and_its_functions_end_with_it(harness: Harness) -> None:
    """A forked stack behaves as a stack that a user started: it does not depend on the process that started it."""
    stack = psutil.Process(user_of(harness.state).info.pid)
    assert os.getsid(stack.pid) not in {stack.pid, os.getsid(0)}
    family = stack.children(recursive=True)
    assert len(family) > 1, family  # the nursery and the functions
    kill(user_of(harness.state))
    assert not psutil.wait_procs(family, timeout=PATIENCE_SECONDS)[1]
    local.up(harness.state)


def test_the_last_try_at_a_commit_counts(tmp_path: Path) -> None:
    case = Case("gke", "success")
    tries = [
        Tried(case, 1, Result(True, 2.0, ["left something"], 3), "tree", str(tmp_path)),
        Tried(case, 2, Result(True, 2.0, [], 3), "tree", str(tmp_path)),
        Tried(case, 1, Result(True, 2.0, [], 3), "tree", str(tmp_path)),
        Tried(case, 3, Result(False, 2.0, ["left something"], 3), "tree", str(tmp_path)),
    ]
    assert [Tried.of(str(tried)) for tried in tries] == tries
    assert [*table(tries)][1].split() == ["gke", "success:", "stack", "after", "3", "2", "1", "8", "[3]"]


def test_a_stack_recovers_after_deaths_during_recovery(harness: Harness) -> None:
    kill(user_of(harness.state))
    deaths = 0
    while local.running(harness.state) is None:
        with patch.dict(os.environ, {VARIABLE: str(1 + 4 * deaths)}), suppress(StackError):
            local.up(harness.state)
        deaths += 1
    assert deaths > 1
    assert harness.attempt(Case("cloud_run", "success"), 0).problems == []


@pytest.mark.parametrize("body", [[], {"commit": -1}, {"commit": True}, {"kill": "unknown"}, {"moment": 1}, {"x": 1}])
def test_an_invalid_crash_switch_is_refused(harness: Harness, body: object) -> None:
    answer = requests.post(f"{harness.user.info.http}/_local/crash", json=body, timeout=60)
    assert answer.status_code == 400
    assert "expected" in answer.text
