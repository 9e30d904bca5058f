"""How soon a stage looks again: soon at first, seldom at what takes long, and never later than it promises."""

from __future__ import annotations

import itertools
import random
from datetime import UTC, datetime, timedelta

import pytest

from dropforge.platforms import servers, targets, usual_of
from dropforge.platforms.platform import Serving, Training, Usual
from dropforge.stages.looks import (
    LONGEST_SECONDS,
    PART,
    SHORTEST_SECONDS,
    SHORTEST_TURN_SECONDS,
    TURNS,
    next_look,
    next_look_since,
    next_turn,
)
from workflows_engine import Limits

DRAWN = [
    (10 ** random.Random(seed).uniform(-2, 5), 10 ** random.Random(-seed).uniform(-1, 4)) for seed in range(1, 300)
]


def looks(takes: float, usual: float) -> list[float]:
    """The times of all looks at something, the last of which sees its end."""
    times = [0.0]
    while times[-1] < takes:
        times.append(times[-1] + next_look(times[-1], usual))
    return times


@pytest.mark.parametrize("waited", [-5.0, 0.0, 0.1, 0.5])
@pytest.mark.parametrize("usual", [0.0, 30.0, 480.0])
def test_the_first_look_is_soon_whatever_is_waited_for(waited: float, usual: float) -> None:
    """Also for a machine whose clock is behind."""
    assert next_look(waited, usual) == SHORTEST_SECONDS


def test_a_wait_has_bounds_and_grows_with_the_time_waited_and_the_usual_time() -> None:
    for waited, usual in DRAWN:
        wait = next_look(waited, usual)
        assert SHORTEST_SECONDS <= wait <= LONGEST_SECONDS
        assert wait <= next_look(waited * 1.5, usual)
        assert wait <= next_look(waited, usual * 1.5)


def test_an_end_is_seen_late_by_a_part_of_its_time_at_most() -> None:
    for takes, usual in DRAWN:
        if takes < 20_000:
            late = looks(takes, usual)[-1] - takes
            assert late <= max(SHORTEST_SECONDS, max(takes, usual) / PART)


@pytest.mark.parametrize(("left", "wait"), [(600, 30), (30, 30), (12, 12), (0.5, 0.5)])
def test_no_look_is_after_the_end_of_what_is_waited_for(left: float, wait: float) -> None:
    now = datetime(2026, 11, 27, tzinfo=UTC)
    began, ends = now - timedelta(hours=1), now + timedelta(seconds=left)
    assert next_look_since(began, now, 300, ends) == wait
    assert next_look_since(began, now, 300) == LONGEST_SECONDS


@pytest.mark.parametrize(
    ("takes", "usual", "most"), [(1, 480, 2), (7, 480, 3), (480, 480, 19), (240, 240, 11), (5, 30, 4)]
)
def test_the_number_of_looks(takes: float, usual: float, most: int) -> None:
    assert len(looks(takes, usual)) <= most


@pytest.mark.parametrize(("days", "most"), [(1, 500), (30, 10_000)])
def test_a_rollout_that_waits_for_weeks_stays_within_the_steps_of_an_execution(days: int, most: int) -> None:
    """A look takes five steps (workflows/rollout.workflows.yaml), and an execution has 100,000."""
    waited = number = 0.0
    while waited < days * 86_400:
        waited, number = waited + next_turn(waited), number + 1
    assert number <= most
    assert most * 5 < Limits().steps


def test_a_turn_is_noticed_late_by_a_part_of_its_wait_at_most() -> None:
    assert next_turn(-1) == next_turn(99) == SHORTEST_TURN_SECONDS
    for waited, _ in DRAWN:
        assert next_turn(waited) <= max(SHORTEST_TURN_SECONDS, waited / TURNS)


def test_each_kind_that_takes_minutes_is_one_that_its_platform_creates() -> None:
    parts: list[Training | Serving] = [*targets().values(), *servers().values()]
    created = set(itertools.chain.from_iterable(part.kinds for part in parts))
    declared = {kind: usual for part in parts for kind, usual in part.usual.items()}
    assert declared.keys() <= created
    assert {kind: usual_of(kind) for kind in created} == {kind: declared.get(kind, Usual()) for kind in created}
    assert usual_of("container.googleapis.com/Cluster").creation == 480
