"""A few of the deaths that `make crash` tries all of: one commit of each of these lives, drawn with a fixed seed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from unittest.mock import patch

import pytest
import requests

from dropforge_local import stack as local
from dropforge_local.crash import VARIABLE

from .conftest import user_of
from .crash import Case, Harness
from .test_faults import kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SEED = 8
FEWEST = 50  # commits of the shortest of these lives
CASES = [
    Case("cloud_run", "serving", "stack", "before"),
    Case("cloud_run", "failure", "stack", "after"),
    Case("cloud_run", "success", "functions"),
    Case("gke", "preempted", "stack", "after"),
    Case("gke", "serving", "containers"),
    Case("tpu_vm", "success", "stack", "before"),
]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with patch.dict(os.environ):
        harness = Harness(tmp_path_factory.mktemp("crash"))
        yield harness
        harness.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.target}-{case.life}-{case.kill}-{case.moment}")
def test_a_death_loses_leaves_and_doubles_nothing(harness: Harness, case: Case) -> None:
    commit = random.Random(f"{SEED} {case}").randint(1, FEWEST)
    result = harness.attempt(case, commit)
    assert result.killed
    assert not result.problems, f"at commit {commit}: {result.problems}"


def test_a_stack_that_dies_while_it_recovers_recovers(harness: Harness) -> None:
    kill(user_of(harness.state))
    deaths = 0
    while local.running(harness.state) is None:
        with patch.dict(os.environ, {VARIABLE: str(1 + 4 * deaths)}), suppress(local.StackError):
            local.up(harness.state)
        deaths += 1
    assert deaths > 1
    assert harness.attempt(Case("cloud_run", "success"), 0).problems == []


@pytest.mark.parametrize("body", [[], {"commit": -1}, {"commit": True}, {"kill": "nobody"}, {"moment": 1}, {"x": 1}])
def test_a_switch_that_makes_no_sense_is_refused(harness: Harness, body: object) -> None:
    answer = requests.post(f"{harness.user.info.http}/_local/crash", json=body, timeout=10)
    assert answer.status_code == 400
    assert "expected" in answer.text
