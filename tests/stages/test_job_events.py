"""Which job events `on_job_event` keeps: those that carry the proof of their run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge.base import names
from dropforge.base.errors import NotFound, RetryLater
from dropforge.run.events import Failed, JobEvent, Preempted, Started, Succeeded, job_event_message
from dropforge.run.proof import PROOF
from dropforge.run.store import RunStore
from dropforge.stages.await_.job_events import receive_job_event

from ..deployments import SETTINGS, Memory, context_with
from ..platforms.shared import ME, make_run

NOW = datetime.now(UTC)
SPEC = {
    "api_version": "dropforge/v1",
    "name": "demo",
    "model": {"source": "owner/tiny-1m"},
    "dataset": {"source": "owner/data"},
    "target": {"type": "cloud_run", "placements": [{"region": "us-central1"}]},
    "serve": None,
}
FIELDS: dict[type[Any], dict[str, Any]] = {
    Started: {},
    Succeeded: {"manifest_uri": "gs://b/m"},
    Preempted: {"step": 1},
    Failed: {"error_class": "code", "message": "forged"},
}


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def store(memory: Memory) -> RunStore:
    return RunStore(memory, SETTINGS.runs_bucket)


def receive(memory: Memory, event: JobEvent, key: str, **attributes: str) -> None:
    data, made = job_event_message(event, key)
    receive_job_event(context_with(storage=memory), data, {**made, **attributes}.get(PROOF))


def kept(store: RunStore, run: str) -> int:
    return len(list(store.names(names.events_prefix(run))))


@pytest.mark.parametrize("kind", FIELDS)
def test_an_event_is_kept_only_with_the_proof_of_its_run(memory: Memory, store: RunStore, kind: type[Any]) -> None:
    run, other = make_run(store, SPEC), make_run(store, SPEC)
    event = kind(run=run, attempt=1, sequence=1, time=datetime.now(UTC), **FIELDS[kind])
    receive(memory, event, "")
    receive(memory, event, store.key(other))
    receive(memory, event.model_copy(update={"sequence": 2}), store.key(run), proof=store.key(run))
    assert kept(store, run) == 0
    receive(memory, event, store.key(run))
    assert kept(store, run) == 1


def test_the_proof_of_one_event_is_not_that_of_another(memory: Memory, store: RunStore) -> None:
    run = make_run(store, SPEC)
    event = Started(run=run, attempt=1, sequence=1, time=datetime.now(UTC))
    _, attributes = job_event_message(event, store.key(run))
    receive(memory, event.model_copy(update={"sequence": 2}), "", proof=attributes[PROOF])
    assert kept(store, run) == 0


def test_without_the_key_of_the_day_nothing_is_proved(memory: Memory, store: RunStore) -> None:
    """Somebody has deleted it."""
    run = make_run(store, SPEC)
    for name in [name for name in memory.objects if name.startswith(names.KEYS_PREFIX)]:
        del memory.objects[name]
    with pytest.raises(NotFound, match="keys/days/"):
        receive(memory, Started(run=run, attempt=1, sequence=1, time=datetime.now(UTC)), "")
    assert kept(store, run) == 0


def test_every_run_has_a_key_of_its_own_that_never_changes(store: RunStore, memory: Memory) -> None:
    runs = [make_run(store, SPEC) for _ in range(3)]
    keys = [store.key(run) for run in runs]
    written = [data.decode() for name, (data, _) in memory.objects.items() if name.startswith(names.KEYS_PREFIX)]
    assert len({*keys, *written}) == 4, "one key of the day, from which nobody reads that of a run"
    assert {len(key) for key in keys} == {64}
    store.create(store.record(runs[0]))
    other = RunStore(memory, SETTINGS.runs_bucket)
    make_run(other, SPEC)
    assert other.key(runs[0]) == store.key(runs[0]) == keys[0]


def test_each_day_has_a_key_of_its_own(memory: Memory, store: RunStore) -> None:
    first, later = make_run(store, SPEC), make_run(store, SPEC)
    made = store.record(first)
    moved = made.model_copy(update={"run": "next-0123456789ab", "created": made.created + timedelta(days=1)})
    assert store.create(moved)
    days = {store.record(run).key_day for run in (first, later, moved.run)}
    assert {names.day_key_object(day) for day in days} == {
        name for name in memory.objects if name.startswith(names.KEYS_PREFIX)
    }
    assert len(days) == len({memory.objects[names.day_key_object(day)][0] for day in days}) == 2


class Callbacks:
    """The callbacks of executions: what each answers, and which were called."""

    def __init__(self, memory: Memory, answers: Mapping[str, int]) -> None:
        self.answers, self.woken = answers, list[str]()
        self.context = context_with(storage=memory, callbacks=self)

    def post(self, url: str, json: object, timeout: float) -> Any:
        self.woken.append(url)
        return SimpleNamespace(status_code=self.answers[url])

    def receive(self, store: RunStore, run: str, sequence: int) -> None:
        data, made = job_event_message(Started(run=run, attempt=1, sequence=sequence, time=NOW), store.key(run))
        receive_job_event(self.context, data, made[PROOF])


def with_callback(store: RunStore, run: str, url: str) -> None:
    store.update(run, lambda record: record.model_copy(update={"execution": ME}).with_callback(ME, url))


def test_the_known_callback_needs_no_second_look_at_the_record(memory: Memory, store: RunStore) -> None:
    run = make_run(store, SPEC)
    with_callback(store, run, "first")
    callbacks = Callbacks(memory, {"first": 200, "second": 200})
    callbacks.receive(store, run, 1)
    with_callback(store, run, "second")
    callbacks.receive(store, run, 2)  # "first" takes it: its execution has not ended
    assert callbacks.woken == ["first", "first"]


@pytest.mark.parametrize("status", [404, 409, 410, 500])
def test_the_execution_that_has_taken_over_is_woken(memory: Memory, store: RunStore, status: int) -> None:
    run = make_run(store, SPEC)
    with_callback(store, run, "first")
    callbacks = Callbacks(memory, {"first": status, "second": 200})
    assert callbacks.context.store.record(run).callback_url == "first"
    with_callback(store, run, "second")
    callbacks.receive(store, run, 1)
    assert callbacks.woken == ["first", "second"]
    assert kept(store, run) == 1


def test_an_inspection_that_notes_its_callback_while_the_event_is_kept_is_woken(
    memory: Memory, store: RunStore
) -> None:
    run = make_run(store, SPEC)
    callbacks = Callbacks(memory, {"first": 200})
    assert callbacks.context.store.record(run).callback_url is None
    with_callback(store, run, "first")
    callbacks.receive(store, run, 1)
    assert callbacks.woken == ["first"]


@pytest.mark.parametrize("status", [404, 500])
def test_a_callback_is_asked_once_and_decides_whether_the_event_comes_again(
    memory: Memory, store: RunStore, status: int
) -> None:
    run = make_run(store, SPEC)
    with_callback(store, run, "first")
    callbacks = Callbacks(memory, {"first": status})
    if status == 404:
        callbacks.receive(store, run, 1)
    else:
        with pytest.raises(RetryLater):
            callbacks.receive(store, run, 1)
    assert callbacks.woken == ["first"]
    assert kept(store, run) == 1
