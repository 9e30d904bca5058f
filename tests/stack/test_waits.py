"""What a run waits for is in its record, on the command line and in its end: a real run that no GPU is free for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from click.testing import CliRunner

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
