"""A whole run in a local stack: a dropped spec is trained, and served by vLLM's CPU build."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
from tests.patience import TRAIN_SECONDS

from dropforge.base.errors import NotFound
from dropforge.run.artifacts import upload_directory
from dropforge.run.record import Record
from dropforge_cli.demo import end_endpoint
from dropforge_cli.deployment import Deployment, of_stack
from dropforge_cli.specs import upload_spec
from dropforge_local import tiny
from dropforge_local.containers.processes import find_members
from dropforge_local.stack import control as stack
from dropforge_local.stack.config import StackConfig

from ...deployments import forget
from ..conftest import DATA, job_spec

RARE_SWEEP_SECONDS = 86400.0
MAX_MODEL_LEN = 128
# A model that has just learnt its answers: each fault changes their probabilities. After 60 steps the model is so
# certain that nine tenths of its adapter give almost the same probabilities (docs/measurements.md#parity).
TRAINING = {"max_steps": 15}


@dataclass(frozen=True)
class WholeRun:
    """A run that has ended, and its local stack, whose state is in `state`."""

    state: Path
    deployment: Deployment
    run: str

    @property
    def record(self) -> Record:
        return self.deployment.store.record(self.run)

    @property
    def token(self) -> str:
        return self.deployment.stack.environment["DROPFORGE_EMULATOR_TOKEN"]  # type: ignore[union-attr]

    def processes(self) -> list[psutil.Process]:
        """The processes of the containers."""
        members = find_members(self.state / "containers").values()
        return [psutil.Process(pid) for pids in members for pid in pids]

    def end(self) -> None:
        end_endpoint(self.deployment, self.record)


def wait_until_ended(deployment: Deployment, run: str) -> None:
    deadline = time.monotonic() + TRAIN_SECONDS
    while time.monotonic() < deadline:
        with suppress(NotFound):
            if deployment.store.record(run).state.is_terminal:
                return
        time.sleep(0.1)
    raise AssertionError(f"the run has not ended: {deployment.store.record(run)!r}")


@pytest.fixture(scope="module")
def vllm_run(vllm_environment: Path, base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeRun]:
    """A run that has ended, with its endpoint. vLLM takes half a minute to start, so the module's tests share it."""
    state = tmp_path_factory.mktemp("stack")
    StackConfig(bases=["vllm"], sweep_seconds=RARE_SWEEP_SECONDS).save(state)
    with patch.dict(os.environ):
        try:
            deployment = of_stack(stack.up(state))
            client = deployment.clients.storage()
            client.create_bucket(DATA)
            upload_directory(client, base_model, f"gs://{DATA}/tiny")
            rows = tiny.dataset(state / "rows.jsonl", rows=355)
            client.bucket(DATA).blob("rows.jsonl").upload_from_filename(str(rows))
            serve = {"type": "cloud_run", "ttl": "1h", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2}
            document = job_spec(name="text-to-sql", training=TRAINING, serve=serve)
            run = upload_spec(deployment, json.dumps(document).encode(), "whole.json")
            wait_until_ended(deployment, run)
            yield WholeRun(state, deployment, run)
        finally:
            stack.down(state)
    forget()
    assert not stack.leftovers(state).processes
