"""The job in the environment, the classes of errors, stop requests, outcomes, and job events."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from google.api_core import exceptions
from google.auth.exceptions import RefreshError
from tests.patience import PATIENCE_SECONDS

from containers.common.errors import BAD_CONFIG, INTERNAL, NOT_FOUND, OUT_OF_MEMORY, JobError, classify
from containers.common.job import Job
from containers.common.model import check_servable
from containers.common.outcome import Outcome, outcome_of
from containers.common.redactor import Redactor
from containers.common.report import (
    PROGRESS_MOST_SECONDS,
    PROGRESS_SECONDS,
    PROGRESS_STEPS,
    Load,
    ProgressMeter,
    Reporter,
    resident_mib,
)
from containers.common.stop import Stopped, StopRequest
from dropforge.base.errors import CloudError, ErrorClass, InvalidSpec, NotFound, SpecProblem
from dropforge.cloud.clients import Clients
from dropforge.run.artifacts import Manifest
from dropforge.run.events import JobEvent, Started, events_of, parse_job_event
from dropforge.run.series import Progress
from dropforge.spec import parse_spec

ENVIRONMENT = {
    "DROPFORGE_PROJECT": "p",
    "DROPFORGE_RUN": "demo-0123456789ab",
    "DROPFORGE_ATTEMPT": "2",
    "DROPFORGE_RUNS_BUCKET": "b",
}
DEAD, LISTENED = "projects/p/topics/dead", "projects/p/topics/listened"
RANK = {"DROPFORGE_NUM_PROCESSES": "2", "DROPFORGE_LAUNCH_DIRECTORY": "/d"}


def job(**changes: str) -> Job:
    return Job.from_environment({**ENVIRONMENT, **changes})


def test_the_environment_describes_the_attempt() -> None:
    read = job(DROPFORGE_DEADLINE="1750000000")
    assert (read.run, read.attempt, read.topic, read.deadline) == ("demo-0123456789ab", 2, "", 1750000000.0)


def test_every_problem_of_the_environment_is_named_at_once() -> None:
    with pytest.raises(JobError) as caught:
        Job.from_environment({"DROPFORGE_RUN": "Demo", "DROPFORGE_ATTEMPT": "0", "DROPFORGE_DEADLINE": "soon"})
    message = caught.value.message
    for part in ("DROPFORGE_PROJECT is not set", "'Demo'", "'0'; expected 1 to 1000", "'soon'; expected Unix seconds"):
        assert part in message


def named(name: str, module: str = "somewhere", bases: tuple[type, ...] = (Exception,)) -> Exception:
    error: Exception = type(name, bases, {"__module__": module})("what happened")
    return error


@pytest.mark.parametrize(
    ("error", "error_class", "exit_code"),
    [
        (InvalidSpec([SpecProblem("/name", "bad")]), ErrorClass.CONFIG, BAD_CONFIG),
        (CloudError(ErrorClass.CONFIG, "no such secret"), ErrorClass.CONFIG, BAD_CONFIG),
        (CloudError(ErrorClass.PERMISSION, "a secret may not be read"), ErrorClass.PERMISSION, NOT_FOUND),
        (CloudError(ErrorClass.TRANSIENT, "not now"), ErrorClass.TRANSIENT, INTERNAL),
        (named("OutOfMemoryError", bases=(RuntimeError,)), ErrorClass.OUT_OF_MEMORY, OUT_OF_MEMORY),
        (MemoryError(), ErrorClass.OUT_OF_MEMORY, OUT_OF_MEMORY),
        (named("GatedRepoError"), ErrorClass.PERMISSION, NOT_FOUND),
        (named("RevisionNotFoundError"), ErrorClass.CONFIG, NOT_FOUND),
        (
            named("LocalEntryNotFoundError", bases=(type("EntryNotFoundError", (Exception,), {}),)),
            ErrorClass.TRANSIENT,
            INTERNAL,
        ),
        (named("HfHubHTTPError"), ErrorClass.TRANSIENT, INTERNAL),
        (NotFound("no objects below gs://b/model/"), ErrorClass.CONFIG, NOT_FOUND),
        (exceptions.NotFound("no such bucket"), ErrorClass.CONFIG, NOT_FOUND),
        (exceptions.BadRequest("a name of 2,000 bytes"), ErrorClass.CONFIG, BAD_CONFIG),
        (exceptions.Forbidden("no"), ErrorClass.PERMISSION, NOT_FOUND),
        (exceptions.ServiceUnavailable("not now"), ErrorClass.TRANSIENT, INTERNAL),
        (exceptions.TooManyRequests("slower"), ErrorClass.TRANSIENT, INTERNAL),
        (RefreshError("access answered 403"), ErrorClass.PERMISSION, NOT_FOUND),
        (RefreshError("access answered 503", retryable=True), ErrorClass.TRANSIENT, INTERNAL),
        (named("TemplateError"), ErrorClass.CONFIG, BAD_CONFIG),
        (ValueError("a bug"), ErrorClass.CODE, INTERNAL),
    ],
)
def test_what_an_exception_means_for_the_run(error: Exception, error_class: ErrorClass, exit_code: int) -> None:
    failure = classify(error)
    assert (failure.error_class, failure.exit_code) == (error_class, exit_code)


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    """An armed stop request; restores the process's own signal handlers."""
    kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = [signal.getsignal(kind) for kind in kinds]
    request = StopRequest()
    request.arm(None)
    yield request
    request.disarm()
    for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)


def test_a_signal_while_a_failure_is_told_does_not_hide_it(stop: StopRequest) -> None:
    class Interrupted(Exception):
        def __str__(self) -> str:  # called while the failure is classified
            signal.raise_signal(signal.SIGTERM)
            return "the disk is on fire"

    def run() -> Outcome:
        raise Interrupted

    outcome = outcome_of(run, job(), stop, Redactor())
    assert (outcome.exit_code, outcome.error_class) == (INTERNAL, ErrorClass.CODE)
    assert outcome.message.startswith("Interrupted at ")  # its text, which may quote a row, is in the log only
    assert stop.reason == "preempted"  # the request is recorded, and the process ends anyway


def test_a_stop_before_there_is_anything_to_save_is_no_failure(stop: StopRequest) -> None:
    def run() -> Outcome:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("never reached")

    outcome = outcome_of(run, job(), stop, Redactor())
    assert (outcome.reason, outcome.step, outcome.agreed) == ("preempted", 0, False)


def test_a_second_signal_does_not_interrupt_the_clean_up(stop: StopRequest) -> None:
    cleaned = []

    def run() -> Outcome:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Stopped as request:
            signal.raise_signal(signal.SIGTERM)  # an impatient person, or the deadline
            cleaned.append(request.reason)
            return Outcome.stopped(request.reason, 7, stop.agreed)
        raise AssertionError("never reached")

    outcome = outcome_of(run, job(), stop, Redactor())
    assert cleaned == ["preempted"]
    assert (outcome.reason, outcome.step) == ("preempted", 7)


def test_secrets_are_taken_out_of_what_is_said() -> None:
    redact = Redactor()
    redact.learn({"MY_KEY": "my-key", "UNSET": "x"}, {"MY_KEY": "plain-looking-value"})
    text = redact("key plain-looking-value, token hf_abcdefghijklmnopqrstuv, run demo")
    assert text == "key [redacted], token [redacted], run demo"


class Recorder(Reporter):
    """A reporter that keeps the progress and the events, and sends none."""

    def __init__(self) -> None:
        super().__init__(job(), Redactor(), Clients())
        self.sent: list[Progress] = []
        self.events: list[JobEvent] = []

    def _keep(self, point: Progress) -> None:
        self.sent.append(point)

    def _send(self, event: JobEvent) -> None:
        self.events.append(event)


def test_sequences_grow_even_within_a_millisecond() -> None:
    reporter, before = Recorder(), time.time()
    for step in range(50):
        reporter.checkpointed(step, "gs://b/c")
    sequences = [event.sequence for event in reporter.events]
    assert sequences == sorted(set(sequences))
    assert int(before * 1000) <= sequences[0] <= time.time() * 1000


def test_progress_is_reported_every_few_steps_and_at_the_end() -> None:
    reporter = Recorder()
    meter = ProgressMeter(reporter, total_steps=50, load=lambda: Load(7, resident_mib(), 0.5))
    meter.begin(0, 0)
    meter.note(0.5, 1e-3)
    for step in range(1, 51):
        meter.step(step, step * 10, None)
    sent: list[Any] = reporter.sent
    assert [event.step for event in sent] == [PROGRESS_STEPS, 2 * PROGRESS_STEPS, 50]
    assert {event.loss for event in sent} == {0.5}
    assert sent[-1].eta_seconds == 0
    assert all(event.tokens_per_second > 0 for event in sent)
    assert {event.accelerator_busy for event in sent} == {0.5}
    assert all(event.accelerator_mib == 7 and 10 < event.host_mib < 10_000 for event in sent)


def test_a_held_out_loss_is_reported_at_once_and_its_time_is_no_training() -> None:
    now, reporter = 0.0, Recorder()
    meter = ProgressMeter(reporter, total_steps=100, clock=lambda: now)
    meter.begin(0, 0)
    for step in range(1, 20):
        now += 0.1
        if step == 7:
            now += 5.0
            meter.note_held_out(0.25, 5.0)
        meter.step(step, step * 10, None)
    sent: list[Any] = reporter.sent
    assert [(event.step, event.held_out_loss) for event in sent] == [(7, 0.25)]
    assert sent[0].tokens_per_second == pytest.approx(100)


@pytest.mark.parametrize(("hours", "most"), [(0.1, 200), (2, 700), (10, 1700)])
@pytest.mark.parametrize("step_seconds", [0.05, 1, 7])
def test_a_long_training_reports_rarely_and_never_pauses_long(hours: float, most: int, step_seconds: float) -> None:
    now, reporter = 0.0, Recorder()
    steps = int(hours * 3600 / step_seconds)
    meter = ProgressMeter(reporter, steps, clock=lambda: now)
    meter.begin(0, 0)
    for step in range(1, steps + 1):
        now += step_seconds
        meter.step(step, step, None)
    sent: list[Any] = reporter.sent
    assert len(sent) <= most
    pauses = [(after.step - before.step) * step_seconds for before, after in pairwise(sent)]
    assert max(pauses) <= PROGRESS_MOST_SECONDS + step_seconds
    assert sent[0].step * step_seconds <= max(PROGRESS_SECONDS, step_seconds) + step_seconds
    assert sent[-1].step == steps


def test_the_log_has_the_first_and_the_last_progress(capfd: pytest.CaptureFixture[str]) -> None:
    meter = ProgressMeter(Recorder(), total_steps=60)
    meter.begin(0, 0)
    for step in range(1, 61):
        meter.note(math.nan if step < 40 else 0.5, None)
        meter.step(step, step * 10, None)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert {line["message"] for line in lines} == {"training"}
    told = [(line["step"], line["total_steps"], line["loss"]) for line in lines]
    assert (told[0], told[-1]) == ((PROGRESS_STEPS, 60, None), (60, 60, 0.5))
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)


def test_a_dead_topic_costs_the_flush_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Publisher:
        def publish(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            allowed.wait()
            raise RuntimeError("no such topic")

    allowed, calls = threading.Event(), list[Any]()
    clients = Clients()
    monkeypatch.setattr(clients, "publisher", Publisher)
    reporter = Reporter(job(DROPFORGE_JOB_EVENTS_TOPIC=DEAD), Redactor(), clients)
    for step in range(200):
        reporter.checkpointed(step, "gs://b/c")
    reporter.close(timeout=0.2)
    assert len(calls) == 1, "nothing has waited for the first call, which has not returned"
    allowed.set()


@pytest.mark.parametrize(
    ("environment", "topics"),
    [
        ({"DROPFORGE_JOB_EVENTS_TOPIC": LISTENED}, [LISTENED]),
        ({}, []),
        ({"DROPFORGE_JOB_EVENTS_TOPIC": LISTENED, **RANK, "RANK": "0", "LOCAL_RANK": "0"}, [LISTENED]),
        ({"DROPFORGE_JOB_EVENTS_TOPIC": LISTENED, **RANK, "RANK": "1", "LOCAL_RANK": "1"}, []),
    ],
    ids=["one process", "no topic", "first rank", "second rank"],
)
def test_events_are_published_once_and_only_where_somebody_listens(
    environment: dict[str, str], topics: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Publisher:
        def publish(self, topic: str, *args: Any, **kwargs: Any) -> Any:
            published.append(topic)
            return Future()

    class Future:
        def result(self, timeout: float) -> None: ...

    published: list[str] = []  # the reporter of the dead topic may still publish
    clients = Clients()
    monkeypatch.setattr(clients, "publisher", Publisher)
    reporter = Reporter(job(**environment), Redactor(), clients)
    reporter.started(0, "cpu")
    reporter.close()
    assert [topic for topic in published if topic != DEAD] == topics


class Published:
    """The messages that a reporter publishes, as a client of Pub/Sub takes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[JobEvent] = []
        self.has_some = threading.Event()
        self.clients = Clients()
        monkeypatch.setattr(self.clients, "publisher", lambda: self)

    def publish(self, topic: str, data: bytes, **_: Any) -> Any:
        if topic == LISTENED:  # the reporter of the dead topic may still publish
            self.messages.append(parse_job_event(data))
            self.has_some.set()
        return self

    def result(self, timeout: float) -> None: ...

    def reporter(self, held: float = PATIENCE_SECONDS) -> Reporter:
        return Reporter(job(DROPFORGE_JOB_EVENTS_TOPIC=LISTENED), Redactor(), self.clients, held)

    @property
    def kinds(self) -> list[list[str]]:
        """The kinds of the events by message."""
        return [[event.type for event in events_of(message)] for message in self.messages]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Published:
    return Published(monkeypatch)


MANIFEST = {
    "run": "demo-0123456789ab",
    "attempt": 2,
    "created": datetime.now(UTC),
    "base": {"uri": "b", "revision": "main"},
    "dataset": {"uri": "d", "revision": "main"},
    "spec_sha256": "0" * 64,
    "serve_path": "attempt-2/model",
    "metrics": {},
    "files": [],
}
ENDS: dict[str, Callable[[Reporter], None]] = {
    "succeeded": lambda reporter: reporter.succeeded(Manifest.model_validate(MANIFEST)),
    "failed": lambda reporter: reporter.failed(JobError(ErrorClass.DATA, 65, "3 rows", "")),
    "preempted": lambda reporter: reporter.preempted(7),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_attempt_that_ends_at_once_tells_start_and_end_by_one_message(end: str, published: Published) -> None:
    reporter = published.reporter()
    reporter.started(40, "cpu")
    ENDS[end](reporter)
    reporter.close(PATIENCE_SECONDS)
    assert published.kinds == [["started", end]]
    started, ended = events_of(published.messages[0])
    assert isinstance(started, Started)
    assert (started.resumed_step, started.device) == (40, "cpu")
    assert started.sequence < ended.sequence
    assert started.time <= ended.time


@pytest.mark.parametrize("end", ENDS)
def test_an_attempt_that_goes_on_tells_its_start_before_it_ends(end: str, published: Published) -> None:
    reporter = published.reporter(held=0.01)
    reporter.started(0, "cpu")
    assert published.has_some.wait(PATIENCE_SECONDS)
    ENDS[end](reporter)
    reporter.close(PATIENCE_SECONDS)
    assert published.kinds == [["started"], [end]]


def test_a_checkpoint_does_not_overtake_the_start(published: Published) -> None:
    reporter = published.reporter()
    reporter.started(0, "cpu")
    reporter.checkpointed(10, "gs://b/c")
    reporter.preempted(10)
    reporter.close(PATIENCE_SECONDS)
    assert published.kinds == [["started"], ["checkpoint"], ["preempted"]]


def test_a_rank_whose_launcher_reports_the_end_still_reports_the_start(published: Published) -> None:
    reporter = published.reporter()
    reporter.started(0, "cpu")
    reporter.close(PATIENCE_SECONDS)
    assert published.kinds == [["started"]]


def test_an_attempt_that_fails_before_its_start_has_none(published: Published) -> None:
    reporter = published.reporter()
    ENDS["failed"](reporter)
    reporter.close(PATIENCE_SECONDS)
    assert published.kinds == [["failed"]]


@pytest.mark.parametrize(
    ("serve", "kind", "refused"),
    [
        ({"type": "cloud_run"}, "lfm3", True),
        ({"type": "gke"}, "lfm3", True),
        (None, "lfm3", False),
        ({"type": "cloud_run"}, "gemma3_text", False),
        ({"type": "cloud_run"}, "", False),
    ],
)
def test_a_model_that_no_endpoint_can_serve_is_refused_before_it_is_trained(
    serve: dict[str, Any] | None, kind: str, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} if kind else {}))
    document = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": "owner/model"},
        "dataset": {"source": "owner/data"},
        "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
        "serve": serve,
    }
    spec = parse_spec(json.dumps(document).encode())
    if not refused:
        check_servable(spec, tmp_path)
        return
    with pytest.raises(JobError, match=r"v0\.29\.0-cu129.* does not know models of type 'lfm3'") as error:
        check_servable(spec, tmp_path)
    assert (error.value.error_class, error.value.exit_code) == (ErrorClass.CONFIG, BAD_CONFIG)
    assert "set serve to null" in error.value.hint
