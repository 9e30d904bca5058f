"""Promises of a sweep as a whole: which runs it settles and restarts, and where the next sweep goes on."""

from __future__ import annotations

from typing import Any

import pytest

from dropforge.run.record import RunState
from dropforge.stages.sweep import cursor, lost_work
from dropforge.stages.sweep.sweep import BATCH, sweep

from ...deployments import intend
from . import test_lost_work as lost
from .test_forged import EXPIRED, VICTIM, World
from .test_many import READ_SECONDS, Crowd


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the sweep settles and restarts."""
    done: list[str] = []

    def restart(context: Any, record: Any, live: frozenset[str]) -> bool:
        done.append(f"restart {record.run}")
        return True

    monkeypatch.setattr(lost_work, "settle", lambda _, record, *__: done.append(f"settle {record.run}"))
    monkeypatch.setattr(lost_work, "restart", restart)
    return done


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_run_is_settled_in_the_sweep_that_has_deleted_its_leftovers(
    is_gone: bool, is_marked: bool, touched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before: its end would be announced while it still costs money."""
    world = World()
    monkeypatch.setattr("dropforge.stages.sweep.orphans.PATIENCE_SECONDS", -1)
    monkeypatch.setattr(world.platform, "teardown", lambda *_: is_gone)
    if is_marked:
        world.context.store.mark_open(world.context.store.record(EXPIRED))
    world.sweep()
    assert (f"settle {EXPIRED}" in touched) is is_gone


def test_a_run_that_has_not_ended_is_looked_at_for_its_execution(touched: list[str]) -> None:
    assert World().sweep().restarted == [VICTIM]
    assert f"restart {VICTIM}" in touched


def test_the_next_sweep_begins_after_the_last_mark_that_this_one_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(monkeypatch, marks=2 * BATCH, specs=0)
    monkeypatch.setattr(
        "dropforge.stages.sweep.sweep.MARKS_UNTIL", 20 * READ_SECONDS
    )  # enough to begin a batch, and no second one
    sweep(crowd.context)
    assert cursor.read(crowd.context) == cursor.Cursor(run=crowd.runs[BATCH - 1])


@pytest.mark.parametrize("state", [RunState.CANCELLED, RunState.FAILED])
def test_a_run_that_did_not_succeed_keeps_no_endpoint(state: RunState, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its endpoint was ready before the run was cancelled, or before its execution failed."""
    world = lost.World(monkeypatch)
    world.add_finished(state, endpoint=lost.endpoint())
    intend(world.store, lost.RUN, lost.KINDS[lost.SERVICE], lost.SERVICE, 1)
    world.cloud.add(lost.SERVICE)
    world.settle()
    assert world.cloud == set()
