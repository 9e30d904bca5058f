"""Run the command line in this process, against a deployment with empty, emulated buckets and topics."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from click.testing import CliRunner, Result

from dropforge.base import names
from dropforge.money.limits import most_usd
from dropforge.run.events import JobEvent
from dropforge.run.index import about
from dropforge.run.record import Attempt, Endpoint, LedgerEntry, Record, ResourceState, RunState, Transition
from dropforge.run.series import Progress, Series, series_object
from dropforge.run.store import RunStore
from dropforge.spec import parse_spec
from dropforge_cli.main import cli
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.emulators.storage import StorageEmulator

from ..deployments import clients, forget
from ..forked import Nursery
from ..stack.zygote import Zygote
from .commands import NOOP_COMMAND, Process, processes_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "cloud-run-gemma-2b-qlora.json"
CREATED = datetime(2026, 11, 20, 12, tzinfo=UTC)

Run = Callable[..., Result]


@pytest.fixture
def dropforge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a command in an empty directory with no deployment configured."""
    monkeypatch.chdir(tmp_path)
    with patch.dict(os.environ):
        for name in list(os.environ):
            is_own = name.startswith("DROPFORGE_") and name != "DROPFORGE_CACHE"
            if is_own or name.endswith("_EMULATOR_HOST"):
                del os.environ[name]
        yield lambda *arguments: CliRunner().invoke(cli, [str(argument) for argument in arguments])
    forget()


@pytest.fixture
def foreground() -> Iterator[None]:
    """Let Ctrl-C reach the started commands, also when the tests run in the background.

    A child process inherits an ignored signal, but not a handled signal. (A preexec function cannot restore the signal:
    this process has gRPC, which prints a warning after a fork.)
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def start(tmp_path: Path, foreground: None) -> Iterator[Callable[..., Process]]:
    """Start commands in an empty directory. A leftover process is killed, and fails the test."""
    with _starting(tmp_path) as start:
        yield start


@pytest.fixture
def fork(tmp_path: Path, nursery: Nursery, zygote: Zygote) -> Iterator[Callable[..., Process]]:
    """Do what `start` does, but fork the commands (forked.py): the import of a command takes longer than its work.

    A stack that NOOP_COMMAND starts is forked, too.
    """
    with _starting(tmp_path, nursery, zygote.address) as start:
        yield start


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Yield the process that forks commands."""
    with closing(Nursery("dropforge_cli.main:cli", paths=[str(ROOT)])) as nursery:
        yield nursery


@contextmanager
def _starting(directory: Path, nursery: Nursery | None = None, zygote: str = "") -> Iterator[Callable[..., Process]]:
    started = []

    def start(*arguments: str, command: list[str] = NOOP_COMMAND) -> Process:
        started.append(Process([*command, *arguments], directory, nursery, zygote))
        return started[-1]

    yield start
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()
    left = processes_of(directory)
    for pid in left:
        psutil.Process(pid).kill()
    assert not left, [process.text() for process in started]


@dataclass
class Deployed:
    """A project with a specs bucket, a runs bucket and a requests topic, without functions or workflow."""

    run: Run
    store: RunStore
    configuration: dict[str, str]

    def record(self, run: str, state: RunState, **changes: Any) -> Record:
        """Put a run's record into the bucket."""
        history = [Transition(state=RunState.ACCEPTED, time=CREATED)]
        if state is not RunState.ACCEPTED:
            history.append(Transition(state=state, time=CREATED + timedelta(seconds=90)))
        source = "gs://s/specs/job.json#1"
        values = {"name": "job", "source": source, "created": CREATED, "history": history, **changes}
        record = Record(run=run, state=state, **values)
        assert self.store.create(record)
        return record

    def spec(self, run: str, **changes: Any) -> None:
        """Put a run's spec into the bucket: that of EXAMPLE with changes. Its record tells what lists show of it."""
        spec = json.dumps({**json.loads(EXAMPLE.read_text()), **changes}).encode()
        self.store.put_new(names.spec_object(run), spec)
        parsed = parse_spec(spec)
        shown = about(parsed, most_usd(parsed))
        self.store.update(run, lambda record: record.model_copy(update={"about": shown}))

    def event(self, event: JobEvent) -> None:
        name = names.event_object(event.run, event.attempt, event.sequence, event.type)
        self.store.put_new(name, event.model_dump_json().encode())

    def series(self, run: str, *points: Progress, quiet_seconds: float = 0) -> None:
        """Put the series of an attempt with these points into the bucket, written so long after the last point."""
        series = Series(run=run, attempt=points[0].attempt, began=CREATED, written=CREATED)
        for point in points:
            series.add(point)
        series.written += timedelta(seconds=quiet_seconds)
        self.store.replace(series_object(series.run, series.attempt), series.encoded(""))

    def ledger(self, run: str, *entries: LedgerEntry) -> None:
        self.store.update(run, lambda record: record.model_copy(update={"resources": list(entries)}))


@pytest.fixture
def deployed(dropforge: Run, tmp_path: Path) -> Iterator[Deployed]:
    clock = SystemClock()

    def build() -> list[Any]:
        database = Database(tmp_path / "state.db")
        return [StorageEmulator(database, tmp_path / "blobs", clock), PubSubEmulator(database, clock)]

    with BackgroundServer(build) as server:
        os.environ["STORAGE_EMULATOR_HOST"], os.environ["PUBSUB_EMULATOR_HOST"] = server.url, server.grpc_address
        forget()
        configuration = toml()
        os.environ["DROPFORGE_PROJECT"] = configuration["project"]
        client = clients.storage()
        for bucket in ("specs_bucket", "runs_bucket"):
            client.create_bucket(configuration[bucket])
        clients.publisher().create_topic(name=f"projects/p/topics/{configuration['operations_topic']}")
        del os.environ["DROPFORGE_PROJECT"]
        write_toml(configuration)
        yield Deployed(dropforge, RunStore(client, configuration["runs_bucket"]), configuration)
        clients.publisher().stop()
        clients.publisher().transport.close()


def toml() -> dict[str, str]:
    """Return the settings of a real project, as in dropforge.toml."""
    return {
        "project": "p",
        "location": "us-central1",
        "specs_bucket": "p-specs",
        "runs_bucket": "p-runs",
        "workflow": "dropforge-run",
        "requests_topic": "dropforge-requests",
        "operations_topic": "dropforge-operations",
        "job_events_topic": "dropforge-job-events",
        "run_events_topic": "dropforge-run-events",
        "train_trl_image": "us-docker.pkg.dev/p/train-trl@sha256:1",
        "serve_vllm_image": "us-docker.pkg.dev/p/serve-vllm@sha256:2",
        "trainer_service_account": "trainer@p.iam.gserviceaccount.com",
        "server_service_account": "server@p.iam.gserviceaccount.com",
    }


def write_toml(values: dict[str, Any]) -> None:
    Path("dropforge.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))


def attempt(number: int = 1, **changes: Any) -> Attempt:
    values: dict[str, Any] = {
        "placement": 0,
        "region": "us-central1",
        "started": CREATED,
        "ended": CREATED + timedelta(minutes=30),
        "deadline": CREATED + timedelta(hours=2),
        "usd_per_hour": 2.0,
        **changes,
    }
    return Attempt(number=number, **values)


def served(hours: float = 2, **changes: Any) -> dict[str, Any]:
    """The fields of the record of a run that trained for half an hour, and then served for 1 USD per hour."""
    began = CREATED + timedelta(minutes=30)
    states = ((RunState.ACCEPTED, CREATED), (RunState.DEPLOYING, began), (RunState.SUCCEEDED, began))
    ended = began + timedelta(hours=hours)
    endpoint: dict[str, Any] = {
        "url": "https://e.run.app",
        "model": "job",
        "service": "s",
        "region": "us-central1",
        "ready": began,
        "expires": ended,
        "ended": ended,
        **changes,
    }
    return {
        "history": [Transition(state=state, time=time) for state, time in states],
        "attempts": [attempt()],
        "serving_usd_per_hour": 1.0,
        "endpoint": Endpoint(**endpoint),
    }


def entry(kind: str, name: str) -> LedgerEntry:
    return LedgerEntry(kind=kind, name=name, attempt=1, state=ResourceState.CREATED, intended=CREATED)
