"""The calls of a no-op run are counted, so that they cannot grow unnoticed. `python -m bench.calls` prints them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from bench.calls import Counts, count_runs, usage_of
from bench.stack import User, running_stack
from dropforge.money.control_plane import RUN, Usage

RUNS = 6
# Of the run that makes the fewest requests. On a busy machine, a container may take so long that `inspect` looks twice,
# which costs 9 requests, a call and 5 steps.
MOST_REQUESTS, MOST_INVOCATIONS, MOST_STEPS = 28, 6, 30

MOST_USD = 0.0007

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Counted:
    """The calls of a run whose attempt ends at once, and of a run whose attempt takes some seconds."""

    least: Counts
    longer: Counts


@pytest.fixture(scope="module")
def counted() -> Counted:
    with patch.dict(os.environ), running_stack(record=True) as (state, info):
        user = User(info)
        found = [count_runs(user, Path(state), RUNS, behave) for behave in ("succeed", "slow")]
    return Counted(*(min(counts, key=lambda each: each.requests.total()) for counts in found))


def test_requests(counted: Counted) -> None:
    assert counted.least.requests.total() <= MOST_REQUESTS, counted.least.requests


def test_calls_of_functions(counted: Counted) -> None:
    assert counted.least.invocations.total() <= MOST_INVOCATIONS, counted.least.invocations


def test_billed_steps(counted: Counted) -> None:
    assert counted.least.steps <= MOST_STEPS


def test_plan_knows_what_the_control_plane_of_a_run_uses(counted: Counted) -> None:
    used: Usage = usage_of(counted.longer, 1)
    above = {name: (value, vars(RUN)[name]) for name, value in vars(used).items() if value > vars(RUN)[name]}
    assert above == {}, "correct RUN in functions/dropforge/money/control_plane.py"
    assert used.usd > RUN.usd / 2, "RUN is far above what a run uses"
    assert RUN.usd <= MOST_USD
