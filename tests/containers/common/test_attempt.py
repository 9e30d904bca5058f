"""The frame of an attempt: a stop request may come at any moment, and the last event still goes out."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest

from containers.common import attempt
from containers.common.attempt import Attempt, run_attempt
from containers.common.errors import STOPPED, infrastructure_error
from containers.common.job import Job
from containers.common.outcome import Outcome
from containers.common.redactor import Redactor
from containers.common.report import Reporter
from dropforge.base.errors import ErrorClass
from dropforge.run.events import Failed, Preempted, parse_job_event

from ...deployments import Memory

EXAMPLE = Path(__file__).parents[3] / "examples" / "local" / "cloud_run.json"

ENVIRONMENT = {
    "DROPFORGE_PROJECT": "p",
    "DROPFORGE_RUN": "test-0123456789ab",
    "DROPFORGE_ATTEMPT": "1",
    "DROPFORGE_RUNS_BUCKET": "b",
    "DROPFORGE_JOB_EVENTS_TOPIC": "projects/p/topics/job-events",
    "DROPFORGE_RUN_KEY": "00" * 32,
}


class Stopping:
    """Clients of an attempt that gets SIGTERM while it makes the client of Cloud Storage."""

    run_spec = None
    environment = ENVIRONMENT

    def __init__(self) -> None:
        self.made: list[str] = []
        self.published: list[bytes] = []

    def storage(self) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        self.made.append("storage")
        return object()

    def publisher(self) -> Any:
        self.made.append("publisher")
        return self

    def publish(self, topic: str, data: bytes, timeout: float, **attributes: str) -> Future[str]:
        self.published.append(data)
        done: Future[str] = Future()
        done.set_result("1")
        return done


@pytest.fixture
def signals() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_stop_request_waits_until_the_clients_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An interrupted import of a client can keep the import's lock; the thread of the last event would then hang."""
    clients, began = Stopping(), []
    monkeypatch.setattr(attempt, "Clients", lambda: clients)

    @contextmanager
    def directory(job: Job) -> Iterator[Path]:
        yield tmp_path

    def run(attempt: Attempt) -> Outcome:
        began.append(attempt)
        return Outcome.done()

    assert run_attempt(run, directory) == STOPPED
    assert clients.made[:2] == ["storage", "publisher"]
    assert not began
    assert [type(parse_job_event(data)) for data in clients.published] == [Preempted]


@pytest.mark.parametrize("given", [True, False])
def test_the_spec_is_read_from_the_bucket_only_if_it_did_not_come_with_the_token(given: bool, tmp_path: Path) -> None:
    """A user's own bucket has no function `access`."""
    document = json.loads(EXAMPLE.read_text())
    bucket = Memory()
    bucket.blob("runs/test-0123456789ab/spec.json").upload_from_string(
        json.dumps(document | {"name": "stored"}).encode(), if_generation_match=0
    )
    parts: Any = dict.fromkeys(("stop", "reporter", "checkpoints"))
    job = Job.from_environment(ENVIRONMENT)
    parts |= {"job": job, "directory": tmp_path, "redact": Redactor(), "client": bucket}
    spec = Attempt(**parts, given_spec=lambda: document | {"name": "given"} if given else None).load_spec()
    assert spec.name == ("given" if given else "stored")


@pytest.mark.usefixtures("signals")
def test_another_thread_can_end_an_attempt_whose_main_thread_is_stuck(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clients = Stopping()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    job, redact = Job.from_environment(), Redactor()
    parts: Any = dict.fromkeys(("stop", "client", "checkpoints", "given_spec"))
    stuck = Attempt(job, tmp_path, redact, reporter=Reporter(job, redact, cast(Any, clients)), **parts)
    watchdog = Thread(target=stuck.fail, args=(infrastructure_error("the training stalled", "see the log"),))
    watchdog.start()
    watchdog.join()
    (event,) = [parse_job_event(data) for data in clients.published]
    assert isinstance(event, Failed)
    assert (event.error_class, event.message) == (ErrorClass.INFRASTRUCTURE, "the training stalled")
