"""What a run waits for is in its record, on the command line and in its end: a real run that no GPU is free for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from click.testing import CliRunner

from dropforge.base.clock import utc_now
from dropforge.run.record import RunState
from dropforge_cli.main import cli

from .conftest import User

pytestmark = pytest.mark.slow
REGION = "us-east4"  # no other test of the stack uses a GPU here
TARGET = {"target": {"type": "cloud_run", "accelerator": "nvidia-l4", "placements": [{"region": REGION}]}}


@pytest.fixture
def one_gpu(user: User) -> Iterator[None]:
    """The project may have one GPU in the region."""

    def switch(**body: Any) -> None:
        requests.post(f"{user.info.http}/_local/cloudrun/faults", json=body, timeout=60).raise_for_status()

    switch(quota={REGION: 1})
    yield
    switch(quota={})


@pytest.fixture
def refused_creates(user: User) -> Iterator[str]:
    """Cloud Run refuses every job, with these words."""

    def switch(**body: Any) -> None:
        requests.post(f"{user.info.http}/_local/cloudrun/faults", json=body, timeout=60).raise_for_status()

    words = "The service is currently unavailable."
    switch(fail_next={"method": "create_job", "status": "UNAVAILABLE", "count": 1000, "message": words})
    yield words
    switch(fail_next=[])


def test_a_run_without_a_free_gpu_says_what_it_waits_for(user: User, one_gpu: None) -> None:
    first = user.drop(user.spec("hang", **TARGET))
    user.wait(first, "TRAINING")
    second = user.drop(user.spec("succeed", **TARGET))
    record = user.wait_for(second, lambda record: bool(record.wait_reason))
    assert record.wait_reason == f"Waiting for nvidia-l4 quota in {REGION}: 1 of 1 in use."
    shown = CliRunner().invoke(cli, ["status", second, "--state", str(user.state)])
    assert record.wait_reason in " ".join(shown.output.split())
    third = user.drop(user.spec("succeed", **TARGET))
    user.wait_for(third, lambda record: bool(record.wait_reason))
    user.publish(user.settings.operations_topic, f'{{"cancel": "{third}"}}'.encode())
    ended = user.wait(third)
    assert ended.error is not None
    assert ended.error.message == f"cancelled while it waited: {record.wait_reason}"
    assert [attempt.ending for attempt in ended.attempts] == ["cancelled"]
    user.publish(user.settings.operations_topic, f'{{"cancel": "{first}"}}'.encode())
    trained = user.wait(second)
    assert (trained.state, trained.wait_reason) == (RunState.SUCCEEDED, "")
    shown = CliRunner().invoke(cli, ["status", third, "--state", str(user.state)])
    assert "cancelled" in shown.output
    assert "success" not in shown.output


def test_a_run_whose_requests_are_refused_says_so_and_costs_nothing(user: User, refused_creates: str) -> None:
    """170 USD an hour, and a budget of 3 USD, which would pay for a minute of a machine."""
    limits = {"limits": {"max_cost_usd": 3}, "serve": None}
    target = {"target": {**TARGET["target"], "price_usd_per_hour": 170}}
    run = user.drop(user.spec("succeed", **target, **limits))
    waiting = user.wait_for(run, lambda record: bool(record.wait_reason))
    assert waiting.wait_reason == refused_creates
    shown = CliRunner().invoke(cli, ["status", run, "--state", str(user.state)])
    assert refused_creates in " ".join(shown.output.split())
    user.publish(user.settings.operations_topic, f'{{"cancel": "{run}"}}'.encode())
    ended = user.wait(run)
    assert (ended.state, ended.cost(utc_now())) == (RunState.CANCELLED, 0)
    assert ended.error is not None
    assert ended.error.message == f"cancelled while it waited: {refused_creates}"
