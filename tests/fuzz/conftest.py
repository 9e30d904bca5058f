"""The deployed functions, in this process, on emulated storage, Pub/Sub, secrets and executions."""

from __future__ import annotations

import base64
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import functions_framework
import pytest

from dropforge.base import names
from dropforge.run.record import Record
from dropforge.run.store import RunStore
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Emulator
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.emulators.secretmanager import SecretManagerEmulator
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.emulators.workflows import WorkflowsEmulator
from dropforge_local.stack.functions_host import SOURCE, entry_points
from workflows_engine import Engine

from ..deployments import clients, forget

PROJECT, SPECS, RUNS = "p1", "p1-specs", "p1-runs"
TOPICS = ("requests", "job-events", "run-events")
WORKFLOW = f"projects/{PROJECT}/locations/us-central1/workflows/run"
WAITS = """
main:
  params: [args]
  steps:
    - create: {call: events.create_callback_endpoint, args: {http_callback_method: POST}, result: callback}
    - wait: {call: events.await_callback, args: {callback: "${callback}", timeout: 3600}, result: told}
    - done: {return: "${told.type}"}
"""
EVENT = {
    "ce-id": "1",
    "ce-source": "//pubsub.googleapis.com/projects/p1/topics/requests",
    "ce-specversion": "1.0",
    "ce-type": "test",
}
_numbers = itertools.count()


@dataclass
class App:
    """Sends requests to every entry point, and reads the runs that result."""

    url: str
    functions: dict[str, Any]
    store: RunStore
    engine: Engine

    def post(self, name: str, body: Any, headers: dict[str, str] | None = None) -> int:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if headers is None else headers
        return int(self.functions[name].post("/", data=data, headers=headers).status_code)

    def message(self, name: str, data: bytes) -> tuple[int, Record | None]:
        """Deliver a Pub/Sub message to a function; return the status, and the record of the run if there is one."""
        key = f"message-{next(_numbers)}"
        encoded = base64.b64encode(data).decode()
        body = {"message": {"data": encoded, "messageId": key, "attributes": {}}, "subscription": "s"}
        status = self.post(name, body, {"Content-Type": "application/json", **EVENT})
        return status, self.store.find(names.run_id_of_message(key))

    def upload(self, data: bytes) -> tuple[int, Record | None]:
        """Upload an object to the specs bucket and deliver its event; return as `message` does."""
        name = f"specs/{next(_numbers)}.json"
        blob = clients.storage().bucket(SPECS).blob(name)
        blob.upload_from_string(data)
        body = {"bucket": SPECS, "name": name, "generation": str(blob.generation), "size": str(len(data))}
        status = self.post("on_spec_uploaded", body, {"Content-Type": "application/json", **EVENT})
        return status, self.store.find(names.run_id_of_object(SPECS, name, blob.generation))

    def executions(self, run: str) -> int:
        """Count the executions that were started for a run."""
        return sum(record.labels.get(names.RUN_LABEL) == run for record in list(self.engine.list(WORKFLOW)))


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    home = tmp_path_factory.mktemp("cloud")
    made: list[Engine] = []
    server = BackgroundServer(lambda: build(home, made))
    with server as ports, patch.dict(os.environ, environment(ports.url, ports.grpc_address)):
        forget()
        functions = {name: functions_framework.create_app(name, str(SOURCE)).test_client() for name in entry_points()}
        yield App(ports.url, functions, RunStore(clients.storage(), RUNS), _Engine(server, made[0]))  # type: ignore[arg-type]
        forget()


class _Engine:
    """The engine; runs every method on the engine's own thread."""

    def __init__(self, server: BackgroundServer, engine: Engine) -> None:
        self._server = server
        self._engine = engine

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._engine, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            async def work() -> Any:
                answer = method(*args, **kwargs)
                return list(answer) if name == "list" else answer

            return self._server.call(work())

        return call


def build(home: Path, made: list[Engine]) -> Sequence[Emulator]:
    db, clock = Database(home / "state.db"), SystemClock()
    storage = StorageEmulator(db, home / "blobs", clock, project=PROJECT)
    pubsub = PubSubEmulator(db, clock, token=lambda audience, email: "")
    engine = Engine(db, clock=clock, authorize=lambda headers: True, callback_base_url="http://127.0.0.1:1")
    for bucket in (SPECS, RUNS):
        storage.create_bucket(bucket)
    for topic in TOPICS:
        pubsub.create_topic(f"projects/{PROJECT}/topics/{topic}")
    engine.deploy(WORKFLOW, WAITS)
    made.append(engine)
    return [storage, pubsub, SecretManagerEmulator(db, clock, PROJECT), WorkflowsEmulator(engine)]


def environment(url: str, grpc: str) -> dict[str, str]:
    names_of = {
        "PROJECT": PROJECT,
        "LOCATION": "us-central1",
        "SPECS_BUCKET": SPECS,
        "RUNS_BUCKET": RUNS,
        "WORKFLOW": "run",
        "REQUESTS_TOPIC": "requests",
        "JOB_EVENTS_TOPIC": "job-events",
        "RUN_EVENTS_TOPIC": "run-events",
        "TRAIN_TRL_IMAGE": "x",
        "SERVE_VLLM_IMAGE": "x",
        "TRAINER_SERVICE_ACCOUNT": "t@p1.iam.gserviceaccount.com",
        "SERVER_SERVICE_ACCOUNT": "s@p1.iam.gserviceaccount.com",
        "TRAIN_MAXTEXT_IMAGE": "x",
        "TRAIN_RAY_IMAGE": "x",
        "SERVE_VLLM_TPU_IMAGE": "x",
        "GKE_CLUSTER": "c1",
        "SLACK_WEBHOOK_SECRET": "",
    }
    return {
        "STORAGE_EMULATOR_HOST": url,
        "SECRET_MANAGER_EMULATOR_HOST": url,
        "PUBSUB_EMULATOR_HOST": grpc,
        "WORKFLOWS_EMULATOR_HOST": grpc,
        "DROPFORGE_EMULATOR_TOKEN": "good",
        **{f"DROPFORGE_{name}": value for name, value in names_of.items()},
    }
