"""The console's reader: which objects it reads for its lists and pages, and the journal of a run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dropforge.base.clock import Clock
from dropforge.base.names import event_object, record_object
from dropforge.endpoints.store import EndpointStore
from dropforge.run.events import Preempted, Started
from dropforge.run.record import About, Record, RunState, Transition
from dropforge.run.series import Progress, Series, series_object, write_series
from dropforge.run.store import RunStore, Versioned
from dropforge_console.reader import Journal, Reader

from ..deployments import Memory

RUN = "job-0123456789ab"
NOW = datetime(2026, 11, 24, tzinfo=UTC)


class Trainer:
    """Writes the series of one attempt."""

    def __init__(self, memory: Memory, attempt: int) -> None:
        self._memory, self._generation = memory, 0
        self.series = Series(run=RUN, attempt=attempt, began=NOW, written=NOW)

    def reach(self, step: int) -> None:
        number = self.series.attempt
        self.series.add(Progress(attempt=number, time=NOW, step=step, total_steps=9))
        written = write_series(self._memory, "runs", self.series, "", self._generation)
        assert written is not None
        self._generation = written

    def break_it(self, content: bytes) -> None:
        self._generation += 1
        self._memory.objects[series_object(RUN, self.series.attempt)] = (content, self._generation)


@pytest.fixture
def memory() -> Memory:
    return Memory()


def steps(journal: Journal) -> list[tuple[int, int]]:
    return [(point.attempt, point.step) for point in journal.progress]


def test_a_journal_has_changed_only_if_a_series_has(memory: Memory) -> None:
    journal, trainer = Journal(RunStore(memory, "runs"), RUN), Trainer(memory, 1)
    assert not journal.refresh(1)
    trainer.reach(1)
    assert journal.refresh(1)
    assert not journal.refresh(1)
    trainer.reach(2)
    assert journal.refresh(1)
    assert steps(journal) == [(1, 1), (1, 2)]


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08", b"x" * (5 << 20)])
def test_a_series_that_a_container_breaks_keeps_the_points_from_before(memory: Memory, content: bytes) -> None:
    journal, trainer = Journal(RunStore(memory, "runs"), RUN), Trainer(memory, 1)
    trainer.reach(1)
    journal.refresh(1)
    trainer.break_it(content)
    assert not journal.refresh(1)
    assert steps(journal) == [(1, 1)]
    trainer.reach(2)
    assert journal.refresh(1)
    assert steps(journal) == [(1, 1), (1, 2)]


def test_the_last_points_of_an_attempt_are_read_after_the_next_has_begun(memory: Memory) -> None:
    journal, first, second = Journal(RunStore(memory, "runs"), RUN), Trainer(memory, 1), Trainer(memory, 2)
    first.reach(1)
    journal.refresh(1)
    first.reach(2)
    assert journal.refresh(2)
    second.reach(3)
    assert journal.refresh(2)
    assert steps(journal) == [(1, 1), (1, 2), (2, 3)]


def test_a_journal_has_the_starts_that_came_with_an_end(memory: Memory) -> None:
    journal = Journal(RunStore(memory, "runs"), RUN)
    started = Started(run=RUN, attempt=2, sequence=5, time=NOW, resumed_step=40)
    end = Preempted(run=RUN, attempt=2, sequence=6, time=NOW, step=40).with_start(started)
    memory.objects[event_object(RUN, 2, 6, "preempted")] = (end.model_dump_json().encode(), 1)
    assert journal.refresh(2)
    assert journal.starts == [started]


def new_run(store: RunStore, number: int, *, is_old: bool = False) -> str:
    run = f"job-{number:012x}"
    history = [Transition(state=RunState.ACCEPTED, time=NOW)]
    about = None if is_old else About(target="gke", model="m")
    created = NOW + timedelta(minutes=number)
    store.create(
        Record(run=run, name="job", source="", state=RunState.ACCEPTED, created=created, history=history, about=about)
    )
    return run


class Counting(RunStore):
    """A store that notes which objects it reads."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory, "runs")
        self.got: list[str] = []

    def read(self, name: str) -> Versioned:
        self.got.append(name)
        return super().read(name)


def reader_of(memory: Memory) -> tuple[Reader, Counting]:
    store = Counting(memory)
    return Reader(store, EndpointStore(store, Clock())), store


def test_the_first_look_reads_no_record_and_the_next_only_what_changed(memory: Memory) -> None:
    writer = RunStore(memory, "runs")
    runs = [new_run(writer, number) for number in range(3)]
    reader, store = reader_of(memory)
    assert reader.refresh() == set(runs)
    assert store.got == []
    assert [summary.run for summary in reader.runs()] == runs[::-1]
    assert reader.refresh() == set()
    writer.update(runs[1], lambda record: record.entered(RunState.CANCELLED, NOW))
    assert reader.refresh() == {runs[1]}
    assert store.got == [record_object(runs[1])]
    assert [summary.state for summary in reader.runs()].count(RunState.CANCELLED) == 1


def test_a_run_is_read_when_its_page_asks_and_again_after_a_change(memory: Memory) -> None:
    writer = RunStore(memory, "runs")
    run = new_run(writer, 1)
    reader, store = reader_of(memory)
    assert reader.find(run) is None, "no look has seen it"
    reader.refresh()
    for _ in range(3):
        found = reader.find(run)
        assert found is not None
        assert found.record.state is RunState.ACCEPTED
    assert store.got.count(record_object(run)) == 1
    writer.update(run, lambda record: record.entered(RunState.CANCELLED, NOW))
    reader.refresh()
    assert (found := reader.find(run)) is not None
    assert found.record.state is RunState.CANCELLED


def test_records_without_a_summary_are_read_and_broken_ones_are_named(memory: Memory) -> None:
    writer = RunStore(memory, "runs")
    old, broken = new_run(writer, 1, is_old=True), "job-00000000000b"
    memory.objects[record_object(broken)] = (b"{}", 1)
    reader, _ = reader_of(memory)
    reader.refresh()
    assert [summary.run for summary in reader.runs()] == [old]
    assert reader.unreadable.keys() == {broken}
    assert reader.find(broken) is None
    assert [run.record.run for run in reader.found([old, broken])] == [old]


def test_the_run_before_is_the_newest_older_run_of_the_name(memory: Memory) -> None:
    writer = RunStore(memory, "runs")
    runs = [new_run(writer, number) for number in range(3)]
    reader, _ = reader_of(memory)
    reader.refresh()
    first, last = reader.find(runs[0]), reader.find(runs[2])
    assert first is not None
    assert last is not None
    assert (before := reader.before(last)) is not None
    assert before.record.run == runs[1]
    assert reader.before(first) is None
