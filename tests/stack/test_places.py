"""Many functions decide at once who gets a place, over real sockets: the limit holds, and the order is kept."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from dropforge.context import Context
from dropforge.run.record import RunState
from dropforge.stages.cancel import cancel
from dropforge.stages.places import OBJECT, known_runs, wait_for_place

from ..deployments import here
from .conftest import User
from .test_crash_windows import ME, accepted

RUNS, MOST_RUNS = 6, 2


def instance() -> Context:
    """Return the context of another instance of a function, in a deployment with a policy."""
    policy = f'{{"api_version": "dropforge/v1", "max_runs": {MOST_RUNS}}}'
    cloud = replace(here().cloud, settings=replace(here().settings, policy=policy))
    return Context(cloud)


@pytest.fixture
def runs(user: User) -> Iterator[list[str]]:
    """Yield accepted runs, the earliest first. Afterwards no run of this deployment has a place."""
    made = [accepted(user, age=timedelta(minutes=RUNS - number)) for number in range(RUNS)]
    yield made
    for run in made:
        cancel(instance(), run)
    assert known_runs(instance()) == set()
    user.store.bucket.blob(OBJECT).delete()


def ask(run: str) -> bool:
    """Ask for a place as `provision` does; return whether the run has one."""
    context = instance()
    return wait_for_place(context, run, ME, context.store.spec(run)) is None


def test_functions_at_once_give_out_each_place_once_and_in_order(user: User, runs: list[str]) -> None:
    with ThreadPoolExecutor(RUNS) as threads:
        first = [run for run, has_place in zip(runs, threads.map(ask, runs), strict=True) if has_place]
        assert len(first) == MOST_RUNS
        waiting = [run for run in runs if run not in first]
        list(threads.map(lambda run: cancel(instance(), run), [first[0], waiting[1]]))
        second = [run for run, has_place in zip(waiting, threads.map(ask, waiting), strict=True) if has_place]
    assert set(second) - {waiting[1]} == {waiting[0]}
    assert user.store.record(waiting[1]).state is RunState.CANCELLED
    queued = [user.store.record(run).queued for run in waiting[2:]]
    assert [wait and wait.place for wait in queued] == [1, 2]
