"""The journal of a run: what the console knows of its progress, while trainers write and break the series."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from dropforge.run.events import Progress
from dropforge.run.series import Series, series_object, write_series
from dropforge.run.store import RunStore
from dropforge_console.reader import Journal

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
        self.series.add(Progress(run=RUN, attempt=number, sequence=step, time=NOW, step=step, total_steps=9))
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
