"""The containers as subprocesses against emulated Cloud Storage and Pub/Sub, on one tiny base model for all tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from tests.patience import PATIENCE_SECONDS, TRAIN_SECONDS

from dropforge.run.artifacts import Manifest, read_artifact, read_manifest, upload_directory
from dropforge.run.events import JobEvent, events_of, parse_job_event
from dropforge.run.proof import EVENT_NAME, PROOF, is_proved
from dropforge.run.series import Series, read_series
from dropforge_local import shims, tiny
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.identity import CLOUD_PLATFORM
from dropforge_local.base.server import BackgroundServer, Emulator, Server
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.emulators.secretmanager import SecretManagerEmulator
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.stack.deployment import libraries_environment

from . import accounts, forked
from .forked import Forked
from .maxtext import base_qwen3, image_driver, maxtext_image, maxtext_zygote, slow_driver, uninterrupted_maxtext
from .names import DATA, PROJECT, ROOT, RUN_KEY, RUNS, TOPIC, attempt_environment, changed

# The names that other files import from this file, and the fixtures that maxtext.py defines.
__all__ = [
    "DATA", "PROJECT", "ROOT", "RUNS", "RUN_KEY", "TOPIC",
    "base_qwen3", "image_driver", "maxtext_image", "maxtext_zygote", "slow_driver", "uninterrupted_maxtext",
]  # fmt: skip
SUBSCRIPTION = f"projects/{PROJECT}/subscriptions/job-events"
MARK = b"the last message so far"
CANARY = "canary-4f1a-not-a-known-prefix"
TOKEN_CANARY = "hf_" + "c" * 30


@dataclass
class Cloud:
    """The emulated cloud of this session."""

    server: Server
    client: Any

    def put(self, bucket: str, name: str, data: bytes | str) -> str:
        self.client.bucket(bucket).blob(name).upload_from_string(data)
        return f"gs://{bucket}/{name}"

    def names(self, bucket: str, prefix: str) -> list[str]:
        return [blob.name for blob in self.client.list_blobs(bucket, prefix=prefix)]

    def environment(self, caller: str = "") -> dict[str, str]:
        """Variables of Google's libraries in a container of the project's owner, or of an account (accounts.py)."""
        token = accounts.IDENTITY.token("OAuth2", CLOUD_PLATFORM, caller)
        return {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/tmp"),
            **libraries_environment(*self.server.addresses(caller), token),
            "DROPFORGE_CPU_STANDS_IN": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }


@dataclass
class Attempt:
    """A process of the training container, and its output."""

    cloud: Cloud
    run: str
    process: subprocess.Popen[str] | Forked
    output: str = ""

    def wait(self, timeout: float = TRAIN_SECONDS) -> int:
        self.output, _ = self.process.communicate(timeout=timeout)
        assert self.process.returncode is not None
        return self.process.returncode

    def wait_for(self, text: str, timeout: float = TRAIN_SECONDS) -> None:
        """Read the log until `text` appears."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            line = self.process.stdout.readline()
            self.output += line
            if text in line:
                return
            assert line or self.process.poll() is None, self.output
        raise AssertionError(f"no {text!r} in {timeout} s: {self.output}")

    def kill(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@dataclass
class Trainer:
    """Starts training attempts, with one process or several, as the local stack does for as many GPUs."""

    cloud: Cloud
    started: list[subprocess.Popen[str] | Forked] = field(default_factory=list)

    def start(
        self,
        spec: dict[str, Any],
        run: str | None = None,
        attempt: int = 1,
        processes: int = 1,
        *,
        interpreters: bool = False,
        **environment: str,
    ) -> Attempt:
        """Start an attempt: forked (forked.py), or with the interpreters and the imports of a real container."""
        run = run or f"test-{uuid.uuid4().hex[:12]}"
        self.cloud.put(RUNS, f"runs/{run}/spec.json", json.dumps(spec))
        values = {
            **self.cloud.environment(),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}",  # /app has the same packages
            **attempt_environment(run, attempt),
        }
        if processes > 1:
            values = {**shims.fsdp_environment(values, processes), "DROPFORGE_NUM_PROCESSES": str(processes)}
        values |= environment
        if interpreters:
            self.started.append(_interpreter(values))
        else:
            forked.prepare(self.cloud.environment())
            self.started.append(Forked(values))
        return Attempt(self.cloud, run, self.started[-1])

    def end(self) -> None:
        for process in self.started:
            kill_all(process.pid)
            process.communicate()

    def manifest(self, run: str) -> Manifest:
        manifest = read_manifest(self.cloud.client, RUNS, run, RUN_KEY)
        assert manifest is not None
        return manifest

    def samples(self, run: str) -> list[dict[str, Any]]:
        return list(json.loads(read_artifact(self.cloud.client, RUNS, self.manifest(run), "samples.json")))


def _interpreter(environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "containers.train_trl.train"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_all(pid: int) -> None:
    """Kill a process and all its descendants, as the kernel does when a container's first process ends."""
    try:
        first = psutil.Process(pid)
        processes = [*first.children(recursive=True), first]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The base model. Made once, in about 20 s, and kept in build/tiny."""
    return tiny.base_model(ROOT / "build" / "tiny")


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Iterator[Cloud]:
    directory = tmp_path_factory.mktemp("cloud")

    def build() -> list[Emulator]:
        db, clock = Database(directory / "state.db"), SystemClock()
        pubsub = PubSubEmulator(db, clock)
        pubsub.create_topic(TOPIC)
        pubsub.create_subscription(SUBSCRIPTION, TOPIC, {"ackDeadlineSeconds": 600})
        secrets = SecretManagerEmulator(db, clock, PROJECT)
        secrets.set_secret("my-key", CANARY.encode())
        return [StorageEmulator(db, directory / "blobs", clock), pubsub, secrets, *accounts.services()]

    with BackgroundServer(build, accounts.CALLERS) as server:
        options = {"api_endpoint": server.url}
        client = storage.Client(project=PROJECT, credentials=AnonymousCredentials(), client_options=options)
        client.create_bucket(RUNS)
        client.create_bucket(DATA)
        upload_directory(client, base_model, f"gs://{DATA}/tiny")
        # 35 rows are held out. The other 320 fill steps of 16: several ranks would pad an incomplete last step.
        rows = tiny.dataset(directory / "rows.jsonl", rows=355)
        client.bucket(DATA).blob("rows.jsonl").upload_from_filename(str(rows))
        yield Cloud(server, client)
        client.close()


@pytest.fixture
def trainer(cloud: Cloud) -> Iterator[Trainer]:
    trainer = Trainer(cloud)
    yield trainer
    trainer.end()


@pytest.fixture(scope="session")
def seen() -> list[JobEvent]:
    return []


@pytest.fixture
def events(cloud: Cloud, seen: list[JobEvent]) -> Iterator[Any]:
    """A function that returns the job events of a run so far, in the order of their sequence."""
    from google.cloud import pubsub_v1

    os.environ["PUBSUB_EMULATOR_HOST"] = cloud.server.grpc_address
    publisher, subscriber = pubsub_v1.PublisherClient(), pubsub_v1.SubscriberClient()

    def pull(run: str) -> list[JobEvent]:
        # The mark is the last message: nothing is left once it has arrived.
        mark = publisher.publish(TOPIC, MARK).result()
        ids: set[str] = set()
        while mark not in ids:
            answer = subscriber.pull(subscription=SUBSCRIPTION, max_messages=500, timeout=PATIENCE_SECONDS, retry=None)
            messages = list(answer.received_messages)
            sent = [item.message for item in messages if item.message.data != MARK]
            assert all(is_proved(RUN_KEY, EVENT_NAME, message.data, message.attributes[PROOF]) for message in sent)
            seen.extend(event for message in sent for event in events_of(parse_job_event(message.data)))
            subscriber.acknowledge(subscription=SUBSCRIPTION, ack_ids=[item.ack_id for item in messages])
            ids.update(item.message.message_id for item in messages)
        return sorted((event for event in seen if event.run == run), key=lambda event: (event.attempt, event.sequence))

    yield pull
    subscriber.close()
    publisher.stop()
    del os.environ["PUBSUB_EMULATOR_HOST"]


@pytest.fixture
def series(cloud: Cloud) -> Any:
    """A function that returns the series of an attempt, whose proof is checked."""

    def read(run: str, attempt: int = 1) -> Series:
        kept = read_series(cloud.client, RUNS, run, attempt, RUN_KEY)
        assert kept is not None
        return kept.series

    return read


@pytest.fixture(scope="session")
def uninterrupted(cloud: Cloud) -> tuple[Attempt, Manifest]:
    """The attempt of an uninterrupted run of two epochs of 20 steps, and its manifest."""
    trainer = Trainer(cloud)
    document = job_spec(training={"max_steps": 40, "checkpoint_steps": 20}, secrets={"MY_KEY": "my-key"})
    references = {"MY_KEY": f"projects/{PROJECT}/secrets/my-key/versions/latest"}
    attempt = trainer.start(document, DROPFORGE_SECRETS=json.dumps(references), HF_TOKEN=TOKEN_CANARY)
    assert attempt.wait() == 0, attempt.output
    return attempt, trainer.manifest(attempt.run)


@pytest.fixture(scope="session")
def two_ranks(cloud: Cloud) -> Iterator[tuple[Attempt, Manifest]]:
    """The same 40 steps of the same 16 rows, in two ranks."""
    trainer = Trainer(cloud)
    training = {"max_steps": 40, "checkpoint_steps": 20, "per_device_train_batch_size": 8}
    try:
        attempt = trainer.start(job_spec(training=training), processes=2)
        assert attempt.wait() == 0, attempt.output
        yield attempt, trainer.manifest(attempt.run)
    finally:
        trainer.end()


@pytest.fixture(scope="session")
def two_machines(cloud: Cloud) -> Iterator[str]:
    """The run id of full fine-tuning with recomputed activations, by one process on each of two machines.

    The first machine starts as a real one does. So its interpreters order sets otherwise than the second machine's.
    """
    trainer = Trainer(cloud)
    training = {"adapter": {"type": "none"}, "learning_rate": 1e-3, "max_steps": 6, "per_device_train_batch_size": 8}
    document = job_spec(training={**training, "gradient_checkpointing": True})
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    environment = {"DROPFORGE_NUM_MACHINES": "2", "DROPFORGE_MAIN_ADDRESS": address, "DROPFORGE_NUM_PROCESSES": "1"}
    run = f"machines-{uuid.uuid4().hex[:12]}"
    attempts = [
        trainer.start(document, run, 1, 2, interpreters=machine == "0", **environment, JOB_COMPLETION_INDEX=machine)
        for machine in "01"
    ]
    try:
        for attempt in attempts:
            assert attempt.wait() == 0, attempt.output
        yield run
    finally:
        trainer.end()


@pytest.fixture
def spec() -> Callable[..., dict[str, Any]]:
    return job_spec


def job_spec(**changes: Any) -> dict[str, Any]:
    """A job spec that trains in seconds; `changes` replace or extend its parts."""
    document: dict[str, Any] = {
        "api_version": "dropforge/v1",
        "name": "tiny",
        "model": {"source": f"gs://{DATA}/tiny"},
        "dataset": {
            "source": f"gs://{DATA}/rows.jsonl",
            "columns": {"prompt": tiny.PROMPT, "completion": "{answer}"},
        },
        "training": {
            "adapter": {"type": "lora", "r": 8, "alpha": 16},
            "max_steps": 12,
            "learning_rate": 5e-3,
            "per_device_train_batch_size": 16,
            "max_length": 128,
            "checkpoint_steps": 100,
        },
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "evaluation": {"holdout_fraction": 0.1, "max_new_tokens": 40},
        "serve": None,
    }
    return changed(document, changes)
