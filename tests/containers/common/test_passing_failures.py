"""Failures of `access`, of the metadata server and of Cloud Storage that pass, and refusals that do not.

The attempts are real but for their training loop: real clients, over real sockets, against the storage emulator.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import RefreshError
from google.cloud import pubsub_v1, storage
from tests.patience import until

from containers.common import attempt as attempts
from containers.common.attempt import Attempt, run_attempt
from containers.common.errors import DONE, INTERNAL, NOT_FOUND, STOPPED, classify
from containers.common.job import Job
from containers.common.outcome import Outcome
from containers.common.publish import Provenance, publish
from containers.serve_vllm.serve import find_model
from dropforge.cloud import run_access
from dropforge.cloud.clients import Clients
from dropforge.cloud.run_metadata import metadata_server
from dropforge.run import artifacts
from dropforge.run.artifacts import Source, checkpoints, read_manifest
from dropforge.run.events import Failed, JobEvent, Preempted, Succeeded, events_of, parse_job_event
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Emulator, Server
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.emulators.storage import StorageEmulator

from ..names import PROJECT, RUN_KEY, RUNS, TOPIC, attempt_environment
from .front import CUT, LATE, LOST, Asked, Fault, Front, front_of, stop_this_process

SPEC = json.loads((Path(__file__).parents[3] / "examples" / "local" / "cloud_run.json").read_text())
SOURCE = Source(uri="gs://data-bucket/x", revision="main")
FAULTS: tuple[Fault, ...] = (503, 429, CUT, 500, LOST, 408)
EVERY = 7
SHORT_SECONDS = 0.01  # the mean of the first wait
LONG_SECONDS = 3600.0
SUBSCRIPTION = f"projects/{PROJECT}/subscriptions/all"
UPLOADING = ("checkpoint", "ThreadPoolExecutor")  # names of threads
LARGE = 9 << 20  # goes to the bucket in a resumable upload


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("cloud")

    def build() -> list[Emulator]:
        db, clock = Database(directory / "state.db"), SystemClock()
        pubsub = PubSubEmulator(db, clock)
        pubsub.create_topic(TOPIC)
        pubsub.create_subscription(SUBSCRIPTION, TOPIC, {"ackDeadlineSeconds": 600})
        return [StorageEmulator(db, directory / "blobs", clock), pubsub]

    with BackgroundServer(build) as server:
        bucket_of(server).create()
        yield server


def bucket_of(cloud: Server) -> Any:
    """The runs bucket, as the control plane sees it."""
    options = {"api_endpoint": cloud.url}
    return storage.Client(project=PROJECT, credentials=AnonymousCredentials(), client_options=options).bucket(RUNS)


@pytest.fixture
def front(cloud: Server) -> Iterator[Front]:
    with front_of(cloud.url) as front:
        front.spec = SPEC
        yield front


@dataclass
class Trained:
    """One attempt of a run of its own, with a training of some checkpoints."""

    cloud: Server
    front: Front
    directory: Path
    monkeypatch: pytest.MonkeyPatch
    run: str = field(default_factory=lambda: f"test-{uuid.uuid4().hex[:12]}")
    wait_seconds: float = SHORT_SECONDS
    steps: int = 1
    export_bytes: int = 10
    reached: int = 0  # the last step of which the checkpoint's upload has ended, well or not

    def begin(self, **environment: str) -> int:
        """Run the attempt; its exit code."""
        values = {**self.front.environment(RUNS), **attempt_environment(self.run, 1)}
        values |= {"PUBSUB_EMULATOR_HOST": self.cloud.grpc_address, **environment}
        for name, value in values.items():
            self.monkeypatch.setenv(name, value)
        self.monkeypatch.setattr(attempts, "Clients", partial(Clients, os.environ, self.wait_seconds))
        return run_attempt(self._train, self._directory)

    @contextmanager
    def _directory(self, job: Job) -> Iterator[Path]:
        self.directory.mkdir(exist_ok=True)
        yield self.directory

    def _train(self, attempt: Attempt) -> Outcome:
        if attempt.resend_success():
            return Outcome.done()
        spec = attempt.load_spec()
        attempt.checkpoints.resume(attempt.directory)
        attempt.reporter.started(0, "cpu")
        for step in range(1, self.steps + 1):
            attempt.reporter.progress(step=step, total_steps=self.steps, loss=1.0)
            local = attempt.directory / f"step-{step}"
            local.mkdir()
            (local / "weights").write_bytes(b"w" * 100)
            attempt.checkpoints.save(step, local, {})
            attempt.checkpoints.wait()
            self.reached = step
        attempt.succeed(self._export(attempt, spec))
        return Outcome.done()

    def _export(self, attempt: Attempt, spec: Any) -> Any:
        export = attempt.directory / "export"
        (export / "model").mkdir(parents=True)
        (export / "model" / "model.safetensors").write_bytes(b"m" * self.export_bytes)
        provenance = Provenance(SOURCE, SOURCE)
        return publish(attempt.client, attempt.job, export, spec, provenance, {"loss": 0.5}, [])

    def checkpoints(self) -> list[int]:
        """The steps of the complete checkpoints, the newest first."""
        client = bucket_of(self.cloud).client
        found = checkpoints(client, RUNS, self.run, RUN_KEY)
        for checkpoint in found:
            artifacts.download_files(client, checkpoint.uri, self.directory / "read" / self.run, checkpoint.files)
        return [checkpoint.step for checkpoint in found]

    def is_committed(self) -> bool:
        manifest = read_manifest(bucket_of(self.cloud).client, RUNS, self.run, RUN_KEY)
        return manifest is not None and not artifacts.verify_manifest(bucket_of(self.cloud).client, RUNS, manifest)

    def last_event(self) -> JobEvent:
        """The last job event of the run."""
        subscriber = pubsub_v1.SubscriberClient()
        try:
            events: list[JobEvent] = []
            while not any(isinstance(event, Succeeded | Failed | Preempted) for event in events):
                answer = subscriber.pull(subscription=SUBSCRIPTION, max_messages=500, timeout=60, retry=None)
                messages = list(answer.received_messages)
                subscriber.acknowledge(subscription=SUBSCRIPTION, ack_ids=[item.ack_id for item in messages])
                told = [event for item in messages for event in events_of(parse_job_event(item.message.data))]
                events += [event for event in told if event.run == self.run]
            return max(events, key=lambda event: event.sequence)
        finally:
            subscriber.close()


@pytest.fixture
def attempt(cloud: Server, front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trained]:
    kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = [signal.getsignal(kind) for kind in kinds]
    yield Trained(cloud, front, tmp_path / "work", monkeypatch)
    front.fault = lambda asked: 403  # ends the threads that a container's end leaves behind
    until(lambda: not any(thread.name.startswith(UPLOADING) for thread in threading.enumerate()))
    for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("of", ["identity", "access"])
def test_a_failure_of_the_first_request_for_a_token_passes(attempt: Trained, of: str, fault: Fault) -> None:
    attempt.front.first(of, fault, fault)
    assert attempt.begin() == DONE
    assert len(attempt.front.met) == 2
    assert attempt.is_committed()
    assert isinstance(attempt.last_event(), Succeeded)


@pytest.mark.parametrize("first", range(EVERY))
def test_a_failure_of_each_request_passes(attempt: Trained, first: int) -> None:
    """Of a resume, of checkpoints, of renewals, of the export, of the manifest and of the series.

    A token lives for a second, so each request to the bucket renews it. Every seventh request fails, from each start.
    """

    def strike(asked: Asked) -> Fault | None:
        turn, rest = divmod(asked.number - first, EVERY)
        return FAULTS[(turn + first) % len(FAULTS)] if rest == 0 else None

    attempt.front.token_seconds, attempt.front.fault = 1, strike
    attempt.steps = 2
    assert attempt.begin() == DONE, attempt.front.met
    assert len(attempt.front.met) > 5
    assert attempt.is_committed()
    assert attempt.checkpoints() == [2, 1]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_in_a_large_upload_of_the_export_passes(attempt: Trained, fault: Fault) -> None:
    """The parts of a large file, and the renewals of the token between them."""
    attempt.export_bytes, attempt.front.token_seconds = LARGE, 1
    left = {"access": 1, "storage": 2}

    def strike(asked: Asked) -> Fault | None:
        if attempt.reached < attempt.steps or not left.get(asked.of):
            return None
        left[asked.of] -= 1
        return fault

    attempt.front.fault = strike
    assert attempt.begin() == DONE
    assert len(attempt.front.met) == 3
    assert attempt.is_committed()


def test_a_token_that_nobody_answers_for_is_asked_for_again(attempt: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_access, "TIMEOUT_SECONDS", 0.2)
    attempt.front.first("access", LATE, LATE)
    assert attempt.begin() == DONE
    assert attempt.is_committed()


def test_an_answer_that_is_no_token_is_asked_for_again(attempt: Trained) -> None:
    attempt.front.first("access", 200)  # the body has no token
    assert attempt.begin() == DONE
    assert len(attempt.front.met) == 1


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_refusal_is_final_at_once_and_names_the_permission(attempt: Trained, status: int) -> None:
    attempt.front.fault = lambda asked: status if asked.of == "access" else None
    attempt.wait_seconds = LONG_SECONDS
    assert attempt.begin() == NOT_FOUND
    event = attempt.last_event()
    assert isinstance(event, Failed)
    assert event.error_class == "permission"
    assert f"answered {status}" in event.message


def test_a_refusal_for_a_while_costs_the_checkpoints_of_that_time_alone(attempt: Trained) -> None:
    """403 while the checkpoints of steps 2 and 3 are uploaded."""
    attempt.front.token_seconds, attempt.steps = 1, 4
    attempt.front.fault = lambda asked: 403 if asked.of == "access" and attempt.reached in (1, 2) else None
    assert attempt.begin() == DONE
    assert attempt.front.met
    assert attempt.checkpoints() == [4, 1]
    assert attempt.is_committed()


def test_a_refusal_of_the_export_keeps_the_checkpoints(attempt: Trained) -> None:
    attempt.front.token_seconds, attempt.steps = 1, 2
    attempt.front.fault = lambda asked: 403 if asked.of == "access" and attempt.reached == 2 else None
    assert attempt.begin() == NOT_FOUND
    event = attempt.last_event()
    assert isinstance(event, Failed)
    assert event.error_class == "permission"
    assert attempt.checkpoints() == [2, 1]


def test_an_older_checkpoint_is_deleted_only_when_the_new_one_is_complete(attempt: Trained) -> None:
    attempt.steps = 3
    attempt.front.fault = lambda asked: 403 if b"step-00000003/_COMPLETE" in asked.body else None
    assert attempt.begin() == DONE
    assert len(attempt.front.met) == 1
    assert attempt.checkpoints() == [2, 1]


@pytest.mark.parametrize("of", ["identity", "access", "storage"])
def test_a_request_to_stop_interrupts_the_wait(attempt: Trained, of: str) -> None:
    def refuse(asked: Asked) -> Fault | None:
        if asked.of != of:
            return None
        stop_this_process()
        return 503

    attempt.front.fault, attempt.wait_seconds = refuse, LONG_SECONDS
    assert attempt.begin() == STOPPED
    assert isinstance(attempt.last_event(), Preempted)


def test_a_request_to_stop_does_not_wait_for_an_upload_that_waits(
    attempt: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the upload waits for a token, and the main thread for the thread."""
    attempt.front.token_seconds, attempt.steps = 1, 2

    def refuse(asked: Asked) -> Fault | None:
        if asked.of != "access" or attempt.reached < 1:
            return None
        stop_this_process()
        return 503

    attempt.front.fault = refuse
    monkeypatch.setattr(attempts, "UPLOAD_SECONDS", 0.1)
    assert attempt.begin(DROPFORGE_GRACE_SECONDS="1") == STOPPED
    event = attempt.last_event()
    assert isinstance(event, Preempted)
    assert event.step == 1
    assert attempt.checkpoints() == [1]


def test_the_deadline_ends_the_wait(attempt: Trained) -> None:
    attempt.front.fault = lambda asked: 503 if asked.of == "access" else None
    assert attempt.begin(DROPFORGE_DEADLINE=f"{time.time() + 30.5:.1f}") == STOPPED
    event = attempt.last_event()
    assert isinstance(event, Failed)
    assert event.error_class == "deadline"


def test_after_the_deadline_a_request_is_made_once(front: Front) -> None:
    front.fault = lambda asked: 503 if asked.of == "access" else None
    clients = Clients({**front.environment(RUNS), "DROPFORGE_DEADLINE": f"{time.time() - 1:.1f}"})
    with pytest.raises(Exception, match="answered 503") as over:
        clients.run_spec()
    assert front.count("access") == 1
    failure = classify(over.value)
    assert (failure.error_class, failure.exit_code) == ("transient", INTERNAL)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("of", ["identity", "access", "storage"])
def test_a_server_that_starts_waits_until_a_failure_passes(attempt: Trained, of: str, fault: Fault) -> None:
    assert attempt.begin() == DONE
    front = attempt.front
    front.first(of, fault, fault)
    clients = Clients(front.environment(RUNS), SHORT_SECONDS)
    uri = artifacts.model_uri(RUNS, attempt.run)
    assert find_model(clients.storage(), uri, RUN_KEY).run == attempt.run
    assert len(front.met) == 2


@pytest.fixture
def lent(front: Front) -> Iterator[Callable[[], Any]]:
    """Ask the metadata server of vLLM's streamer and of TensorStore for a token."""
    server = metadata_server(Clients(front.environment(RUNS), SHORT_SECONDS))
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/computeMetadata/v1/instance/service-accounts/default/token"

    def ask() -> Any:
        with urlopen(Request(url, headers={"Metadata-Flavor": "Google"}), timeout=60) as answer:
            return json.load(answer)

    yield ask
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("fault", FAULTS)
def test_other_libraries_get_a_token_when_a_failure_has_passed(front: Front, lent: Any, fault: Fault) -> None:
    front.first("access", fault, fault)
    assert lent()["access_token"].startswith("token-")
    assert len(front.met) == 2


def test_other_libraries_are_told_of_a_refusal(front: Front, lent: Any) -> None:
    front.fault = lambda asked: 403 if asked.of == "access" else None
    with pytest.raises(HTTPError, match="503") as refused:
        lent()
    refused.value.close()
    assert front.count("access") == 1


def test_the_publisher_of_a_container_repeats_what_may_pass(
    front: Front, cloud: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**front.environment(RUNS), "PUBSUB_EMULATOR_HOST": cloud.grpc_address}
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", cloud.grpc_address)
    policy = Clients(environment, SHORT_SECONDS).publisher().publisher_options.retry
    errors = [RefreshError("the metadata server answered 503", retryable=True)] * 2

    def send() -> str:
        if errors:
            raise errors.pop()
        return "sent"

    assert policy(send)() == "sent"


def test_a_container_makes_its_clients_before_the_metadata_server_answers(front: Front) -> None:
    """google.auth.default would give up when the metadata server does not answer within seconds."""
    environment = {name: value for name, value in front.environment(RUNS).items() if name != "STORAGE_EMULATOR_HOST"}
    assert Clients({**environment, "DROPFORGE_PROJECT": PROJECT}).storage().project == PROJECT
    assert not front.asked
