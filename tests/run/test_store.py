"""The run store with the emulated Cloud Storage: another process may have changed a record that is cached."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dropforge.base.clock import utc_now
from dropforge.base.errors import Conflict
from dropforge.run.record import Record, ResourceState, RunState, Transition
from dropforge.run.store import RunStore, Versioned
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.storage import StorageEmulator

from ..deployments import intend

BUCKET = "runs"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage

    home = tmp_path_factory.mktemp("runs")

    def build() -> list[Any]:
        emulator = StorageEmulator(Database(home / "state.db"), home / "blobs", SystemClock())
        emulator.create_bucket(BUCKET)
        return [emulator]

    with BackgroundServer(build) as server:
        options = {"api_endpoint": server.url}
        with storage.Client("p1", AnonymousCredentials(), client_options=options) as storage_client:
            yield storage_client


@pytest.fixture
def process(client: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], CountingStore]:
    """Return a function that makes a store with an empty cache, like a new process."""
    return lambda: CountingStore(client, BUCKET)


class CountingStore(RunStore):
    """A store that counts its reads and writes."""

    def __init__(self, client: Any, bucket: str) -> None:
        super().__init__(client, bucket)
        self.reads = self.writes = 0

    def read(self, name: str) -> Versioned:
        self.reads += 1
        return super().read(name)

    def _write(self, *arguments: Any, **options: Any) -> int | None:
        self.writes += 1
        return super()._write(*arguments, **options)


def new_run(store: RunStore) -> str:
    run, now = f"store-{next(_numbers):012x}", utc_now()
    history = [Transition(state=RunState.ACCEPTED, time=now)]
    record = Record(run=run, name="store", source="gs://b/o#1", state=RunState.ACCEPTED, created=now, history=history)
    assert store.create(record)
    return run


def test_a_process_changes_its_own_record_without_another_read(process: Callable[[], CountingStore]) -> None:
    store = process()
    run = new_run(store)
    for key in ("a", "b", "c"):
        store.update(run, lambda record, key=key: record.with_notice(key))  # type: ignore[misc]
    intend(store, run, "kind", "resource", 1)
    store.note(run, ["resource"], ResourceState.CREATED)
    store.note(run, ["resource"], ResourceState.GONE)
    assert store.reads == 0
    other = process()
    assert other.record(run).notices == ["a", "b", "c"]
    assert other.ledger(run).remaining() == []


def test_a_change_by_another_process_is_not_overwritten(process: Callable[[], CountingStore]) -> None:
    first, second = process(), process()
    run = new_run(first)
    second.update(run, lambda record: record.with_notice("second"))
    first.update(run, lambda record: record.with_notice("first"))
    assert first.reads == 1, "the record is read once, after the refused write"
    assert second.update(run, lambda record: record.with_notice("again")).notices == ["second", "first", "again"]
    intend(first, run, "kind", "resource", 1)
    intend(second, run, "kind", "two", 1)
    first.note(run, ["resource"], ResourceState.GONE)
    assert [entry.name for entry in second.ledger(run).remaining()] == ["two"]


def test_a_call_that_is_not_wanted_any_more_creates_nothing(process: Callable[[], CountingStore]) -> None:
    store, resources = process(), [("kind", "resource")]
    run = new_run(store)
    assert not store.intend_all(store.record(run), resources, 1, lambda _: False)
    assert store.ledger(run).remaining() == []


def test_an_intent_that_the_record_has_costs_no_request(process: Callable[[], CountingStore]) -> None:
    store, resources = process(), [("kind", "resource")]
    run = new_run(store)
    intend(store, run, "kind", "resource", 1)
    record = store.record(run)
    reads, writes = store.reads, store.writes
    assert store.intend_all(record, resources, 1, lambda _: True)
    assert not store.intend_all(record, resources, 1, lambda _: False)
    assert (store.reads, store.writes) == (reads, writes)


def test_an_update_without_a_change_is_decided_on_the_current_record(process: Callable[[], CountingStore]) -> None:
    first, second = process(), process()
    run = new_run(first)
    second.update(run, lambda record: record.model_copy(update={"cancel_requested": utc_now()}))
    seen = first.update(run, lambda record: record.with_notice("seen") if record.cancel_requested else record)
    assert seen.notices == ["seen"]


def test_a_refusal_is_decided_on_the_current_record(process: Callable[[], CountingStore]) -> None:
    first, second = process(), process()
    run = new_run(first)
    second.update(run, lambda record: record.entered(RunState.PROVISIONING, utc_now()))
    assert first.update(run, lambda record: record.entered(RunState.TRAINING, utc_now())).state is RunState.TRAINING
    with pytest.raises(Conflict, match="is TRAINING; it cannot become ACCEPTED"):
        first.update(run, lambda record: record.entered(RunState.ACCEPTED, utc_now()))


def test_no_change_is_lost_when_writes_are_refused(process: Callable[[], CountingStore]) -> None:
    stores = [process() for _ in range(4)]
    run = new_run(stores[0])
    keys = [(store, f"{number}-{key}") for key in range(5) for number, store in enumerate(stores)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda pair: pair[0].update(run, lambda record: record.with_notice(pair[1])), keys))
    assert sorted(stores[1].record(run).notices) == sorted(key for _, key in keys)


def test_the_cache_of_a_process_is_bounded(
    process: Callable[[], CountingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropforge.run.store.KNOWN", 2)
    store = process()
    runs = [new_run(store) for _ in range(3)]
    for run in runs:
        store.update(run, lambda record: record.with_notice("notice"))
    assert store.reads == 3, "each run is read again: the cache dropped it before its turn"
    assert all(store.record(run).notices == ["notice"] for run in runs)
