"""A whole local stack with containers that train nothing, and what a user does with it."""

from __future__ import annotations

import itertools
import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from dropforge import clients, names
from dropforge.errors import NotFound
from dropforge.runs import Record, RunStore
from dropforge.settings import Settings, settings
from dropforge_local import stack as local
from dropforge_local.stack import IMAGES, StackConfig, StackInfo

NOOP_IMAGES = Path(__file__).resolve().parents[1] / "images"
NOOP_SETTINGS = {
    "DROPFORGE_TRAIN_TRL_IMAGE": f"{IMAGES}/train-noop:test",
    "DROPFORGE_SERVE_VLLM_IMAGE": f"{IMAGES}/serve-noop:test",
    "DROPFORGE_CHECK_INTERVAL_SECONDS": "2",
}
_CACHED: list[Any] = [
    clients.storage, clients.publisher, clients.run_jobs, clients.run_executions, clients.run_tasks,
    clients.run_services, clients.secrets, clients.workflow_executions, clients.callbacks, settings,
]  # fmt: skip


class User:
    """Somebody who drops specs and looks at what becomes of them, through ordinary clients."""

    _numbers = itertools.count()

    def __init__(self, state: Path, info: StackInfo) -> None:
        self.state = state
        self.info = info
        self.settings = Settings.from_environment(info.environment)
        self.store = RunStore(clients.storage(), self.settings.runs_bucket)

    def spec(self, behave: str = "succeed", **changes: Any) -> dict[str, Any]:
        """A small valid spec that trains only; `changes` replace top-level fields."""
        return {
            "api_version": "dropforge/v1",
            "name": "noop",
            "model": {"source": "owner/tiny-1m"},
            "dataset": {"source": "owner/data"},
            "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}, {"region": "europe-west4"}]},
            "serve": None,
            "labels": {"behave": behave},
            **changes,
        }

    def drop(self, spec: dict[str, Any] | bytes, name: str | None = None) -> str:
        """Upload a spec to the specs bucket; its run id."""
        name = name or f"specs/test-{os.getpid()}-{next(self._numbers)}.json"
        blob = clients.storage().bucket(self.settings.specs_bucket).blob(name)
        blob.upload_from_string(spec if isinstance(spec, bytes) else json.dumps(spec), "application/json", retry=None)
        return names.run_id_of_object(self.settings.specs_bucket, name, blob.generation)

    def publish(self, topic: str, data: bytes, **attributes: str) -> str:
        future = clients.publisher().publish(self.settings.topic(topic), data, **attributes)
        return str(future.result(20))

    def wait(self, run: str, *states: str, timeout: float = 60) -> Record:
        """The record, once it is in one of `states` (default: a terminal one)."""
        return self.wait_for(run, lambda r: r.state in states if states else r.state.is_terminal, timeout)

    def wait_for(self, run: str, condition: Callable[[Record], bool], timeout: float = 60) -> Record:
        record: Record | None = None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                record = self.store.record(run)
            except NotFound:
                record = None
            if record is not None and condition(record):
                return record
            time.sleep(0.05)
        raise AssertionError(f"run {run} was not there in {timeout} s; it is {record!r}")

    def slack(self, run: str, last: str) -> list[str]:
        """The headlines of the Slack messages about a run, in order, once the last of them ends with `last`."""
        headlines: list[str] = []
        deadline = time.monotonic() + 20
        while not (headlines and headlines[-1].endswith(last)) and time.monotonic() < deadline:
            with urllib.request.urlopen(f"{self.info.http}/slack/messages", timeout=10) as response:
                payloads = [message["payload"] for message in json.load(response)["messages"]]
            headlines = [p["blocks"][0]["text"]["text"] for p in payloads if run in json.dumps(p)]
            time.sleep(0.02)
        return headlines

    def executions(self, run: str) -> list[Any]:
        """The workflow's executions for a run."""
        from google.cloud.workflows import executions_v1

        request = executions_v1.ListExecutionsRequest(
            parent=self.settings.workflow_name, view=executions_v1.ExecutionView.FULL
        )
        found = clients.workflow_executions().list_executions(request)
        return [e for e in found if e.labels.get(names.RUN_LABEL) == run]

    def resources(self, run: str) -> list[str]:
        """What the cloud lists for a run."""
        found = []
        for region in ("us-central1", "europe-west4"):
            parent = f"projects/{self.settings.project}/locations/{region}"
            found += [
                *clients.run_jobs().list_jobs(parent=parent),
                *clients.run_services().list_services(parent=parent),
            ]
        return [resource.name for resource in found if resource.labels.get(names.RUN_LABEL) == run]


@pytest.fixture
def open_user() -> Iterator[Callable[[Path], User]]:
    """Point this process's clients at a stack that a test starts itself."""
    with patch.dict(os.environ):

        def open_user(state: Path) -> User:
            return user_of(state)

        yield open_user
    _forget_clients()


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One stack for every test that does not break it."""
    state = tmp_path_factory.mktemp("stack")
    StackConfig(images=str(NOOP_IMAGES), settings=NOOP_SETTINGS, cloud_run={"gpu_quota": 1000}).save(state)
    local.up(state)
    yield state
    local.down(state)
    remains = local.leftovers(state)
    assert not remains.processes
    assert not remains.ports


@pytest.fixture
def user(shared_stack: Path) -> Iterator[User]:
    with patch.dict(os.environ):
        yield user_of(shared_stack)


def user_of(state: Path) -> User:
    info = local.running(state)
    assert info is not None, (state / "stack.log").read_text()
    if os.environ.get("STORAGE_EMULATOR_HOST") != info.http:
        _forget_clients()
    os.environ.update(info.environment)
    return User(state, info)


def _forget_clients() -> None:
    for function in _CACHED:
        function.cache_clear()
