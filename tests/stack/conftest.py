"""Fixtures: a whole local stack with containers that train nothing, and its user."""

from __future__ import annotations

import itertools
import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.patience import PATIENCE_SECONDS, looks

from dropforge.base import names
from dropforge.base.errors import NotFound
from dropforge.base.settings import Settings
from dropforge.run.record import Record
from dropforge.run.store import RunStore
from dropforge_local.stack import control as local
from dropforge_local.stack.config import StackConfig, StackInfo
from dropforge_local.stack.deployment import IMAGES

from ..deployments import clients, forget
from .clusters import Clusters
from .machines import machines_of_run
from .targets import PARTS, SERVES
from .zygote import Zygote

NOOP_IMAGES = Path(__file__).resolve().parents[1] / "images"
NOOP_SETTINGS = {
    "DROPFORGE_TRAIN_TRL_IMAGE": f"{IMAGES}/train-noop:test",
    "DROPFORGE_TRAIN_MAXTEXT_IMAGE": f"{IMAGES}/train-noop:test",
    "DROPFORGE_TRAIN_RAY_IMAGE": f"{IMAGES}/ray-noop:test",
    "DROPFORGE_SERVE_VLLM_IMAGE": f"{IMAGES}/serve-noop:test",
    "DROPFORGE_SERVE_VLLM_TPU_IMAGE": f"{IMAGES}/serve-noop:test",
    "DROPFORGE_CHECK_INTERVAL_SECONDS": "2",
}
NOOP_CONFIG = StackConfig(
    images=str(NOOP_IMAGES),
    settings=NOOP_SETTINGS,
    cloud_run={"gpu_quota": 1000},
    gke={"create_seconds": 0.3, "delete_seconds": 0.2},
    kubernetes={
        "node_seconds": 0.1,
        "node_idle_seconds": 5.0,
        "job_backoff_seconds": 0.1,
        "longest_pre_stop_seconds": 0.3,
        "preemption_grace_seconds": 2.0,
        "ray_probe_seconds": 0,
        "ray_poll_seconds": 0.2,
    },
    tpu={
        "create_seconds": 0.1,
        "delete_seconds": 0.05,
        "queue_seconds": 0.05,
        "grace_seconds": 5.0,
        "reboot_seconds": 0.1,
        "chips_per_zone": 1000,
    },
    compute={"create_seconds": 0.05, "delete_seconds": 0.05, "disk_gb_per_zone": 100_000},
)
# Tests call the sweep themselves: a scheduled sweep would take over every run without a live execution.
RARE_SWEEP_SECONDS = 86400.0


class User:
    """A user who drops specs and observes the runs through ordinary clients."""

    _numbers = itertools.count()

    def __init__(self, state: Path, info: StackInfo) -> None:
        self.state = state
        self.info = info
        self.settings = Settings.from_environment(info.environment)
        self.store = RunStore(clients.storage(), self.settings.runs_bucket)

    def spec(self, behave: str = "succeed", **changes: Any) -> dict[str, Any]:
        """Return a small valid spec without `serve`; `changes` replace top-level fields."""
        return {
            "api_version": "dropforge/v1",
            "name": "noop",
            "model": {"source": "owner/tiny-1m"},
            "dataset": {"source": "owner/data"},
            "training": {"adapter": {"type": "none"}},  # every target supports this adapter
            "target": {"type": "cloud_run", **PARTS["cloud_run"]},
            "serve": None,
            "labels": {"behave": behave},
            **changes,
        }

    def drop(self, spec: dict[str, Any] | bytes, name: str | None = None) -> str:
        """Upload a spec to the specs bucket; return the run id."""
        name = name or f"specs/test-{os.getpid()}-{next(self._numbers)}.json"
        blob = clients.storage().bucket(self.settings.specs_bucket).blob(name)
        blob.upload_from_string(spec if isinstance(spec, bytes) else json.dumps(spec), "application/json", retry=None)
        return names.run_id_of_object(self.settings.specs_bucket, name, blob.generation)

    def publish(self, topic: str, data: bytes, **attributes: str) -> str:
        future = clients.publisher().publish(self.settings.topic(topic), data, **attributes)
        return str(future.result(20))

    def wait(self, run: str, *states: str, timeout: float = PATIENCE_SECONDS) -> Record:
        """Wait until the run is in one of `states` (default: the terminal states); return its record."""
        return self.wait_for(run, lambda r: r.state in states if states else r.state.is_terminal, timeout)

    def wait_for(self, run: str, condition: Callable[[Record], bool], timeout: float = PATIENCE_SECONDS) -> Record:
        record: Record | None = None
        for _ in looks(timeout):
            try:
                record = self.store.record(run)
            except NotFound:
                record = None
            if record is not None and condition(record):
                return record
        raise AssertionError(f"run {run} did not meet the condition within {timeout} s; its record: {record!r}")

    def until(self, condition: Callable[[], object], timeout: float = PATIENCE_SECONDS) -> None:
        assert any(condition() for _ in looks(timeout)), f"the condition is not met after {timeout} s"

    def slack(self, run: str, last: str) -> list[str]:
        """Wait until the last Slack headline about a run has `last`; return all its headlines, without the short id."""
        headlines: list[str] = []
        for _ in looks(PATIENCE_SECONDS):
            with urllib.request.urlopen(f"{self.info.http}/slack/messages?containing={run}", timeout=60) as response:
                payloads = [message["payload"] for message in json.load(response)["messages"]]
            short = f" ({run.rpartition('-')[2]})"
            headlines = [payload["blocks"][0]["text"]["text"].replace(short, "") for payload in payloads]
            if headlines and last in headlines[-1]:
                break
        return headlines

    def executions(self, run: str) -> list[Any]:
        """Return the workflow's executions for a run."""
        from google.cloud.workflows import executions_v1

        request = executions_v1.ListExecutionsRequest(
            parent=self.settings.workflow_name, view=executions_v1.ExecutionView.FULL
        )
        executions = clients.workflow_executions().list_executions(request)
        return [e for e in executions if e.labels.get(names.RUN_LABEL) == run]

    def resources(self, run: str) -> list[str]:
        """Return the names of all resources that the cloud lists for a run."""
        listed = []
        for region in ("us-central1", "europe-west4", "us-east4"):
            parent = f"projects/{self.settings.project}/locations/{region}"
            listed += [
                *clients.run_jobs().list_jobs(parent=parent),
                *clients.run_services().list_services(parent=parent),
            ]
        serverless = [resource.name for resource in listed if resource.labels.get(names.RUN_LABEL) == run]
        return serverless + machines_of_run(self.settings.project, run) + Clusters(self.info).of_run(run)

    def training(self, run: str) -> str:
        """Return the resource in which a run trains."""
        return next(name for name in self.resources(run) if "jobs/" in name or "/queuedResources/" in name)

    def machine(self, run: str) -> str:
        """Return the TPU VM of a run."""
        return next(name for name in self.resources(run) if "/nodes/" in name)

    def preempt(self, run: str) -> None:
        """Preempt the machine of a run."""
        resource = self.training(run)
        if "/k8s/" in resource:
            cluster, pod = next(iter(Clusters(self.info).pods(run)))
            self.post("_local/kubernetes/faults", {"preempt": {"cluster": cluster, "pod": pod}})
        else:
            self._strike(run, "preempt")

    def run_out_of_memory(self, run: str) -> None:
        """Fill the memory of the machine of a run on Cloud Run or Cloud TPU."""
        self._strike(run, "out_of_memory")

    def _strike(self, run: str, fault: str) -> None:
        resource = self.training(run)
        if "/queuedResources/" in resource:
            self.post("_local/tpu/faults", {fault: self.machine(run)})
        else:
            execution = next(iter(clients.run_executions().list_executions(parent=resource)))
            self.post("_local/cloudrun/faults", {fault: execution.name})

    def post(self, path: str, body: dict[str, Any]) -> None:
        """POST JSON to the stack's own interface."""
        data = json.dumps(body).encode()
        urllib.request.urlopen(
            urllib.request.Request(f"{self.info.http}/{path}", data, method="POST"), timeout=PATIENCE_SECONDS
        ).close()

    def delete(self, resource: str) -> None:
        """Delete a resource that `resources` lists, as a person does in the console."""
        if "/k8s/" in resource:
            Clusters(self.info).delete(resource)
        elif "/queuedResources/" in resource:
            clients.tpu().delete_queued_resource({"name": resource, "force": True}).result(timeout=PATIENCE_SECONDS)
        else:
            clients.run_jobs().delete_job(name=resource).result(timeout=PATIENCE_SECONDS)


@pytest.fixture
def open_user() -> Iterator[Callable[[Path], User]]:
    """Yield a function that points this process's clients at a stack that the test started."""
    with patch.dict(os.environ):

        def open_user(state: Path) -> User:
            return user_of(state)

        yield open_user
    forget()


@pytest.fixture(scope="session")
def fork_stack(zygote: Zygote) -> Callable[[Path], StackInfo]:
    """Return a function that does what `control.up` does, but forks the stack (zygote.py): a start takes 3 s otherwise.

    The stacks of tests/cli and of tests/contract are started as users start them.
    """

    def fork(state: Path) -> StackInfo:
        with patch.object(local, "_spawn", zygote.spawn):
            return local.up(state)

    return fork


@pytest.fixture
def own_stack(
    tmp_path: Path, open_user: Callable[[Path], User], fork_stack: Callable[[Path], StackInfo]
) -> Iterator[Callable[[], User]]:
    """Yield a function that starts or restarts a stack that only this test uses."""
    with _own_stack(tmp_path / "stack", open_user, fork_stack) as start:
        yield start


@pytest.fixture
def unforked_stack(tmp_path: Path, open_user: Callable[[Path], User]) -> Iterator[Callable[[], User]]:
    """Yield `own_stack` for a stack that starts as users start it: the functions are the stack's child process."""
    with _own_stack(tmp_path / "stack", open_user, local.up) as start:
        yield start


@contextmanager
def _own_stack(
    state: Path, open_user: Callable[[Path], User], up: Callable[[Path], StackInfo]
) -> Iterator[Callable[[], User]]:
    NOOP_CONFIG.save(state)

    def start() -> User:
        up(state)
        return open_user(state)

    yield start
    local.down(state)
    assert not local.leftovers(state).processes


@pytest.fixture(params=list(PARTS))
def target(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the `target` of a spec; the test runs once for each target of the stack."""
    return {"type": request.param, **PARTS[request.param]}


@pytest.fixture(params=list(SERVES))
def serve(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the `serve` of a spec; the test runs once for each kind of endpoint of the stack."""
    return {"type": request.param, **SERVES[request.param]}


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory, fork_stack: Callable[[Path], StackInfo]) -> Iterator[Path]:
    """Yield the state directory of the stack that the tests share; a test must not break it."""
    state = tmp_path_factory.mktemp("stack")
    replace(NOOP_CONFIG, sweep_seconds=RARE_SWEEP_SECONDS).save(state)
    fork_stack(state)
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
        forget()
    os.environ.update(info.environment)
    return User(state, info)
