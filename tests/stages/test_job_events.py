"""Which job events `on_job_event` keeps: those that carry the proof of their run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from dropforge.base import names
from dropforge.run.events import Failed, JobEvent, Preempted, Started, Succeeded, job_event_message
from dropforge.run.proof import PROOF
from dropforge.run.store import RunStore
from dropforge.stages.await_.job_events import receive_job_event

from ..deployments import SETTINGS, Memory, context_with
from ..platforms.shared import make_run

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


def test_the_events_of_a_run_that_has_no_key_are_kept(memory: Memory, store: RunStore) -> None:
    """The run was accepted before there were keys, so its container proves nothing."""
    run = make_run(store, SPEC)
    del memory.objects[names.key_object(run)]
    receive(memory, Started(run=run, attempt=1, sequence=1, time=datetime.now(UTC)), "")
    assert kept(store, run) == 1


def test_every_run_has_a_key_of_its_own_that_never_changes(store: RunStore, memory: Memory) -> None:
    runs = [make_run(store, SPEC) for _ in range(3)]
    keys = [store.key(run) for run in runs]
    assert len({*keys}) == 3
    assert {len(key) for key in keys} == {64}
    store.create(store.record(runs[0]))
    assert RunStore(memory, SETTINGS.runs_bucket).key(runs[0]) == keys[0]
