"""Promises of the store that several functions use at once, on a bucket in memory: a mutant breaks each of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.api_core.exceptions import ServiceUnavailable

from dropforge.base import names
from dropforge.base.errors import Conflict, Malformed
from dropforge.run import store as module
from dropforge.run.record import Attempt, Ledger, Record, ResourceState, RunState, Transition
from dropforge.run.store import RunStore

from ..deployments import Blob, Memory, TestClock

NOW = datetime(2026, 11, 26, tzinfo=UTC)
RUN = "demo-0123456789ab"


def record(run: str = RUN, **fields: Any) -> Record:
    history = [Transition(state=RunState.ACCEPTED, time=NOW)]
    usual = {"name": "demo", "source": "the first", "state": RunState.ACCEPTED, "created": NOW, "history": history}
    return Record(run=run, **{**usual, **fields})


class Bucket(Memory):
    """The bucket of two functions, `mine` and `other`."""

    def __init__(self) -> None:
        super().__init__()
        self.mine, self.other = self.function(), self.function()

    def function(self) -> RunStore:
        return RunStore(self, "runs", TestClock(NOW))

    @property
    def record(self) -> Record:
        """The record as the bucket has it."""
        return self.function().record(RUN)


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def renamed(name: str, wanted: str = "") -> Any:
    """A change that gives the run another name, if it has the wanted one."""
    return lambda found: found.model_copy(update={"name": name}) if wanted in ("", found.name) else found


def test_a_spec_that_is_delivered_twice_has_the_first_record(bucket: Bucket) -> None:
    assert bucket.mine.create(record())
    assert not bucket.other.create(record(source="the second"))
    assert bucket.record.source == "the first"


@pytest.mark.parametrize("dies", [False, True])
def test_a_run_is_watched_before_it_has_a_record(bucket: Bucket, dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that dies between the two leaves a mark, which the sweep follows, and never a record without one."""
    upload = Blob.upload_from_string

    def upload_or_die(blob: Blob, data: bytes, *arguments: Any, **options: Any) -> None:
        if dies and blob.name == names.open_object(RUN):
            raise ServiceUnavailable("killed")
        upload(blob, data, *arguments, **options)

    monkeypatch.setattr(Blob, "upload_from_string", upload_or_die)
    if dies:
        with pytest.raises(ServiceUnavailable):
            bucket.mine.create(record())
    else:
        bucket.mine.create(record())
    assert (names.open_object(RUN) in bucket.objects) is bucket.mine.exists(RUN) is not dies


def test_a_change_that_lost_a_race_is_made_on_the_newer_state(bucket: Bucket) -> None:
    """`mine` remembers the state from before the change of `other`."""
    bucket.mine.create(record())
    bucket.other.update(RUN, renamed("of other"))
    changed = bucket.mine.update(RUN, lambda found: found.model_copy(update={"name": f"{found.name} and mine"}))
    assert changed.name == bucket.record.name == "of other and mine"


def test_a_change_that_the_remembered_state_does_not_need_is_made_if_the_present_one_does(bucket: Bucket) -> None:
    bucket.mine.create(record(name="demo"))
    bucket.other.update(RUN, renamed("of other"))
    assert bucket.mine.update(RUN, renamed("of mine", wanted="of other")).name == "of mine"
    assert bucket.record.name == "of mine"


def test_a_change_that_the_remembered_state_refuses_is_made_if_the_present_one_allows_it(bucket: Bucket) -> None:
    bucket.mine.create(record())
    bucket.other.update(RUN, lambda found: found.entered(RunState.PROVISIONING, NOW))
    assert bucket.mine.update(RUN, lambda found: found.entered(RunState.TRAINING, NOW)).state is RunState.TRAINING


def test_a_change_that_the_present_state_refuses_raises(bucket: Bucket) -> None:
    bucket.mine.create(record(state=RunState.CANCELLED))
    with pytest.raises(Conflict):
        bucket.mine.update(RUN, lambda found: found.entered(RunState.TRAINING, NOW))


def test_functions_that_lose_several_races_succeed(bucket: Bucket) -> None:
    bucket.mine.create(record(name=""))
    races = iter(range(module.UPDATE_TRIES - 2))

    def overtaken(found: Record) -> Record:
        if next(races, None) is not None:
            bucket.other.update(RUN, lambda latest: latest.model_copy(update={"name": f"{latest.name}x"}))
        return found.model_copy(update={"name": f"{found.name}y"})

    bucket.mine.update(RUN, overtaken)
    assert bucket.record.name == "x" * (module.UPDATE_TRIES - 2) + "y"


def test_a_function_remembers_a_bounded_number_of_records(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN", 2)
    runs = [f"demo-{number:012x}" for number in range(4)]
    for run in runs:
        bucket.mine.create(record(run))
    del bucket.objects[names.record_object(runs[0])]
    del bucket.objects[names.record_object(runs[3])]
    assert bucket.mine.recall(runs[0]) is None
    assert bucket.mine.known(runs[3]) is not None


def test_a_record_of_another_run_is_refused(bucket: Bucket) -> None:
    other = record("other-0123456789ab")
    bucket.objects[names.record_object(RUN)] = (other.model_dump_json().encode(), 1)
    with pytest.raises(Malformed, match="'other-0123456789ab'"):
        bucket.mine.record(RUN)


def test_the_ledger_says_when_a_resource_was_created_and_when_it_was_gone() -> None:
    later = NOW + timedelta(minutes=1)
    ledger = Ledger(run=RUN).with_intents([("Job", "j")], 1, NOW)
    for state, time in ((ResourceState.CREATED, NOW), (ResourceState.GONE, later)):
        ledger = ledger.with_state(["j"], state, time)
    [entry] = ledger.entries
    assert (entry.state, entry.created, entry.gone) == (ResourceState.GONE, NOW, later)


def test_the_launch_of_an_attempt_is_noted_once() -> None:
    attempt = Attempt(number=1, placement=0, region="r", started=NOW, deadline=NOW + timedelta(hours=1))
    launched = record(attempts=[attempt]).with_launch(1, NOW)
    assert launched.with_launch(1, NOW + timedelta(minutes=1)).attempts[0].launched == NOW


def test_a_record_is_known_while_another_call_writes_it(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a job event that arrives meanwhile costs no read."""
    bucket.mine.create(record())
    upload, seen = Blob.upload_from_string, list[str]()

    def upload_slowly(blob: Blob, data: bytes, *arguments: Any, **options: Any) -> None:
        known = bucket.mine.known(RUN)
        seen.append(known.name if known else "")
        upload(blob, data, *arguments, **options)

    monkeypatch.setattr(Blob, "upload_from_string", upload_slowly)
    bucket.mine.update(RUN, renamed("first"))
    bucket.mine.update(RUN, renamed("second"))
    assert seen == ["demo", "first"]


def test_a_slow_read_replaces_no_newer_memory(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next write of this process would fail, and read again."""
    bucket.mine.create(record())
    read, download, reads = RunStore.read, Blob.download_as_bytes, list[str]()

    def read_slowly(store: RunStore, name: str) -> Any:
        found = read(store, name)
        bucket.mine.update(RUN, renamed("written meanwhile"))
        return found

    def count(blob: Blob, *arguments: Any, **options: Any) -> bytes:
        reads.append(blob.name)
        return download(blob, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "read", read_slowly)
        assert bucket.mine.record(RUN).name == "demo"
    monkeypatch.setattr(Blob, "download_as_bytes", count)
    bucket.mine.update(RUN, renamed("last"))
    assert reads == []
