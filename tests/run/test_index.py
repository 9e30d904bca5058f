"""The index of runs with the emulated Cloud Storage: forged and broken summaries."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from google.api_core.exceptions import ServiceUnavailable

from dropforge.base import names
from dropforge.base.clock import utc_now
from dropforge.run.index import read_index
from dropforge.run.record import About, Record, RunState, Transition
from dropforge.run.store import RunStore
from dropforge.run.summary import KEY
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.storage import ObjectChange, StorageEmulator

_numbers = itertools.count()


class Service:
    """The emulated service. `on_change` hears of each change before it is durable."""

    def __init__(self, home: Any) -> None:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage

        self.changes: list[ObjectChange] = []
        self.on_change: Callable[[ObjectChange], None] = lambda _: None
        self._home = home
        self._server = BackgroundServer(self._build)
        self.url = self._server.__enter__().url
        self.client = storage.Client("p1", AnonymousCredentials(), client_options={"api_endpoint": self.url})

    def _build(self) -> list[Any]:
        database = Database(self._home / "state.db")
        self._emulator = StorageEmulator(database, self._home / "blobs", SystemClock(), self._heard)
        return [self._emulator]

    def _heard(self, change: ObjectChange) -> None:
        self.changes.append(change)
        self.on_change(change)

    def close(self) -> None:
        self.client.close()
        self._server.__exit__()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("index"))
    yield service
    service.close()


@pytest.fixture
def store(service: Service) -> Iterator[RunStore]:
    """Return the store of an empty bucket."""
    service.changes.clear()
    name = f"runs-{next(_numbers)}"
    service.client.create_bucket(name)
    yield RunStore(service.client, name)
    service.on_change = lambda _: None


def fresh(store: RunStore) -> RunStore:
    """Return the store of another process, which remembers nothing."""
    return RunStore(store.bucket.client, store.bucket.name)


def new_run(store: RunStore) -> str:
    run, now = f"index-{next(_numbers):012x}", utc_now()
    history = [Transition(state=RunState.ACCEPTED, time=now)]
    about = About(target="gke", model="m", labels={"team": "\u00e4\u2028\U0001f600"})
    record = Record(run=run, name="n", source="s", state=RunState.ACCEPTED, created=now, history=history, about=about)
    assert store.create(record)
    return run


def metadata(store: RunStore, run: str) -> dict[str, str]:
    return store.bucket.get_blob(names.record_object(run)).metadata or {}


def forge(store: RunStore, run: str, text: str) -> None:
    blob = store.bucket.get_blob(names.record_object(run))
    blob.metadata = {KEY: text}
    blob.patch()


def test_one_listing_has_the_summaries_of_all_runs(store: RunStore) -> None:
    runs = [new_run(store) for _ in range(3)]
    store.update(runs[0], lambda record: record.entered(RunState.PROVISIONING, utc_now()))
    reader = fresh(store)
    reader.read = reader.record = None  # type: ignore[assignment]  # nothing but the listing is read
    index = read_index(reader)
    assert [summary.run for summary in index.summaries] == runs[::-1]
    assert {summary.run: summary.state for summary in index.summaries}[runs[0]] is RunState.PROVISIONING
    assert index.summaries[0].labels == {"team": "\u00e4\u2028\U0001f600"}


def test_a_listing_in_pages_and_parts_has_every_run_once(
    service: Service, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the caller knew: nothing, the runs of a moment ago, a deleted run, or runs before and after all."""
    runs = [new_run(store) for _ in range(5)]
    monkeypatch.setattr(service.client, "list_blobs", partial(service.client.list_blobs, page_size=2))
    assert [listed.run for listed in fresh(store).listed()] == runs
    generations = fresh(store).generations()
    assert list(generations) == runs
    for cuts in ([runs[2]], runs, ["a-000000000000", f"{runs[1]}0", "z-000000000000"]):
        assert fresh(store).generations(cuts) == generations


def test_a_page_that_cannot_be_listed_is_no_end(
    service: Service, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        new_run(store)

    def listing(*arguments: Any, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(pages=broken(list_blobs(*arguments, page_size=2, **options).pages))

    def broken(pages: Iterator[Any]) -> Iterator[Any]:
        yield next(pages)
        raise ServiceUnavailable("no second page")

    list_blobs = service.client.list_blobs
    monkeypatch.setattr(service.client, "list_blobs", listing)
    for cuts in ([], ["z-000000000000"]):
        with pytest.raises(ServiceUnavailable):
            fresh(store).generations(cuts)
    with pytest.raises(ServiceUnavailable):
        read_index(fresh(store))
    assert gc.isenabled()


def test_garbage_from_before_a_listing_is_still_collected(store: RunStore) -> None:
    """The console lists runs for weeks: what no collection ever visits again is a leak."""
    new_run(store)
    frozen = gc.get_freeze_count()
    read_index(fresh(store))
    assert gc.get_freeze_count() <= frozen  # an object that nothing refers to any more leaves them at any time


@pytest.mark.parametrize("text", ["", "{", '{"run":"x"}', "of another run", "of this run, changed"])
def test_metadata_that_is_forged_or_broken_is_never_believed(store: RunStore, text: str) -> None:
    run, other = new_run(store), new_run(store)
    right = metadata(store, run)[KEY]
    texts = {"of another run": metadata(store, other)[KEY], "of this run, changed": right.replace("ACCEPTED", "FAILED")}
    forge(store, run, texts.get(text, text))
    shown = {summary.run: summary for summary in read_index(fresh(store)).summaries}
    assert shown.keys() == {run, other}
    assert shown[run].state is RunState.ACCEPTED


def test_an_object_that_is_no_record_is_reported_and_hides_no_run(store: RunStore) -> None:
    run, broken = new_run(store), f"index-{next(_numbers):012x}"
    store.put_new(names.record_object(broken), b"{}")
    store.put_new("runs/stray/record.json", b"{}")
    store.put_new(f"runs/{run}/deep/record.json", b"{}")
    index = read_index(fresh(store))
    assert [summary.run for summary in index.summaries] == [run]
    assert broken in str(index.unreadable[0])
