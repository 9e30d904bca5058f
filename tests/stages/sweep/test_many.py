"""The sweep among many open marks and junk specs: what costs money ends on time, and everything has its turn."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from dropforge.base import names
from dropforge.context import Context
from dropforge.run.record import RunState
from dropforge.stages.sweep import cursor, lost_work
from dropforge.stages.sweep.sweep import BATCH, MARKS_UNTIL, SPECS_UNTIL, sweep

from ...deployments import Blob, TestClock
from .test_forged import EXPIRED, NOW, World, record, service

TIME_OUT = 540.0  # of a function: terraform/functions.tf
READ_SECONDS = 0.5  # a slow bucket: a sweep then has time for a few hundred reads alone


class Slow(TestClock):
    """A clock that each read of the bucket moves."""

    def __init__(self) -> None:
        super().__init__(NOW)
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


class Crowd(World):
    """A deployment with many open runs that never had a record, and specs that are none."""

    def __init__(self, patch: pytest.MonkeyPatch, marks: int, specs: int) -> None:
        super().__init__()
        self.slow = Slow()
        self.context = Context(replace(self.context.cloud, clock=self.slow), self.context.platforms)
        self.ended_at: list[float] = []
        self.looked: list[str] = []
        self.tried: list[str] = []
        self.runs = [f"run-{number:012x}" for number in range(marks)]
        for run in self.runs:
            self.forge(names.open_object(run), b"")
            self.forge(names.record_object(run), record(run, RunState.FAILED).model_dump_json().encode())
        self.specs = [f"specs/{number:06}.json" for number in range(specs)]
        dropped = [lost_work.Dropped(name, 1, 2, NOW - lost_work.LOST_AFTER * 2) for name in self.specs]
        patch.setattr(lost_work, "specs", lambda cloud: dropped)
        patch.setattr(lost_work, "submit", self.submit)
        patch.setattr(lost_work, "settle", self.settle)
        read = Blob.download_as_bytes

        def slowly(blob: Blob, **options: Any) -> bytes:
            self.slow.seconds += READ_SECONDS
            return read(blob, **options)

        patch.setattr(Blob, "download_as_bytes", slowly)

    def submit(self, context: Context, blob: Any, now: datetime) -> str:
        self.slow.seconds += READ_SECONDS
        self.tried.append(blob.name)
        return ""

    def settle(self, context: Context, settled: Any, *_: Any) -> None:
        self.looked.append(settled.run)

    def teardown(self, cloud: Any, kind: str, name: str) -> bool:
        self.ended_at.append(self.slow.seconds)
        return super().teardown(cloud, kind, name)

    def sweep_again(self) -> float:
        """Sweep once more, and return how long it took."""
        began = self.slow.seconds
        sweep(self.context)
        return self.slow.seconds - began


def test_an_endpoint_past_its_ttl_ends_before_any_mark_or_spec_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many marks as here, the sweep's time once was over before the first deletion."""
    crowd = Crowd(monkeypatch, marks=3000, specs=3000)
    assert crowd.sweep_again() < TIME_OUT
    assert crowd.deleted == [service(EXPIRED)]
    assert crowd.ended_at[0] <= 10 * READ_SECONDS


def test_each_sweep_goes_on_where_the_last_one_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(monkeypatch, marks=2000, specs=700)
    sweeps = 0
    while not (set(crowd.looked) >= set(crowd.runs) and set(crowd.tried) >= set(crowd.specs)):
        sweeps += 1
        assert sweeps < 10, (len(set(crowd.looked)), len(set(crowd.tried)))
        assert crowd.sweep_again() < SPECS_UNTIL + 2 * BATCH * READ_SECONDS < TIME_OUT
    assert sweeps > 2, "one sweep had time for everything: this test shows nothing"
    assert len(crowd.tried) < 2 * len(crowd.specs), "the sweep began with the same specs again and again"


def test_a_sweep_with_enough_time_leaves_no_place_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(monkeypatch, marks=BATCH + 1, specs=BATCH + 1)
    monkeypatch.setattr("dropforge.stages.sweep.sweep.MARKS_UNTIL", 1.0)
    sweep(crowd.context)
    stopped = cursor.read(crowd.context).run
    assert stopped == ""  # no batch was begun
    monkeypatch.setattr("dropforge.stages.sweep.sweep.MARKS_UNTIL", MARKS_UNTIL + crowd.slow.seconds)
    sweep(crowd.context)
    assert set(crowd.looked) >= set(crowd.runs)
    assert cursor.read(crowd.context) == cursor.Cursor()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"run": 5}'])
def test_an_unreadable_place_is_the_beginning(content: bytes) -> None:
    world = World()
    world.forge(cursor.OBJECT, content)
    assert cursor.read(world.context) == cursor.Cursor()
    cursor.write(world.context, cursor.Cursor(), cursor.Cursor("run", "spec"))
    assert cursor.read(world.context) == cursor.Cursor("run", "spec")
