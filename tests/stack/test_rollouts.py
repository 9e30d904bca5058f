"""A sample of the deaths that `python -m tests.stack.rollouts crash` tries: one commit of each rollout."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from dropforge_local.stack import control as local

from .rollouts import Death, RolloutHarness
from .zygote import Zygote

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SEED = 9
FEWEST = 12  # the number of commits of the shortest rollout
DEATHS = [
    ("cloud_run", "deploy", "stack"),
    ("cloud_run", "deploy", "functions"),
    ("cloud_run", "canary", "stack"),
    ("cloud_run", "rollback", "stack"),
    ("cloud_run", "refused", "functions"),
    ("gke", "deploy", "stack"),
    ("gke", "canary", "stack"),
    ("gke", "rollback", "functions"),
    ("gke", "refused", "stack"),
]


@pytest.fixture(scope="module")
def harness(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, zygote: Zygote
) -> Iterator[RolloutHarness]:
    with patch.dict(os.environ), patch.object(local, "_spawn", zygote.spawn):
        harness = RolloutHarness(tmp_path_factory.mktemp("rollouts"), request.param)
        yield harness
        harness.close()


@pytest.mark.parametrize(("harness", "life", "kill"), DEATHS, indirect=["harness"])
def test_a_rollout_ends_by_itself_after_a_death_and_the_model_before_serves_until_then(
    harness: RolloutHarness, life: str, kill: str
) -> None:
    commit = random.Random(f"{SEED} {life} {kill}").randint(1, FEWEST)
    result = harness.roll(Death(life, kill, commit))
    assert result.killed
    assert not result.problems, f"at commit {commit}: {result.problems}"
