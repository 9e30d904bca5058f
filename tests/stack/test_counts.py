"""The calls of a no-op run are counted, so that they cannot grow unnoticed. `python -m bench.calls` prints them."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from bench.calls import Counts, count_runs, usage_of
from bench.stack import User, running_stack

from dropforge.control_plane import RUN, Usage

RUNS = 6
# The mean of RUNS runs: 30, 7 and 30, if `inspect` finds the manifest when the first event wakes it. Otherwise it looks
# twice, which costs 9 requests, a call and 5 steps.
MOST_REQUESTS, MOST_INVOCATIONS, MOST_STEPS = 37, 8, 35

MOST_USD = 0.0007

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def counted() -> Counts:
    with patch.dict(os.environ), running_stack(record=True) as (state, info):
        return count_runs(User(info), Path(state), RUNS)


def test_requests(counted: Counts) -> None:
    assert counted.requests.total() / RUNS <= MOST_REQUESTS, counted.requests


def test_calls_of_functions(counted: Counts) -> None:
    assert counted.invocations.total() / RUNS <= MOST_INVOCATIONS, counted.invocations


def test_billed_steps(counted: Counts) -> None:
    assert counted.steps / RUNS <= MOST_STEPS


def test_plan_knows_what_the_control_plane_of_a_run_uses(counted: Counts) -> None:
    used: Usage = usage_of(counted, RUNS)
    above = {name: (value, vars(RUN)[name]) for name, value in vars(used).items() if value > vars(RUN)[name]}
    assert above == {}, "correct RUN in functions/dropforge/control_plane.py"
    assert used.usd > RUN.usd / 2, "RUN is far above what a run uses"
    assert RUN.usd <= MOST_USD
