"""When a training makes no progress for too long: by its own pace, and never later than `limits.stuck_after`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge.run.events import Started
from dropforge.run.record import Attempt, Record, RunState, Transition
from dropforge.run.series import Kept, Progress, Series
from dropforge.run.standstill import LEAST_SECONDS, Standstill, standstill, unusual
from dropforge.spec import Limits

RUN = "r-0123456789ab"
BEGAN = datetime(2026, 11, 29, 12, tzinfo=UTC)
HOUR = 3600.0
AHEAD = timedelta(days=1)  # the trainer's clock
Points = Sequence[tuple[float, int]]  # seconds after BEGAN, and the step


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def kept(points: Points, total: int = 1000) -> Kept | None:
    """A series that the bucket received with its last point."""
    if not points:
        return None
    series = Series(run=RUN, attempt=1, began=BEGAN + AHEAD, written=BEGAN + AHEAD)
    for seconds, step in points:
        series.add(Progress(attempt=1, time=at(seconds) + AHEAD, step=step, total_steps=total))
    return Kept(series, 1, at(points[-1][0]))


def found(
    points: Points, now: float, *, starts: Sequence[float] = (0.0,), total: int = 1000, **limits: Any
) -> Standstill:
    stands = standstill(kept(points, total), map(at, starts), Limits(**limits), at(now))
    assert stands is not None
    return stands


def every(seconds: float, count: int = 20, first: float = 300.0) -> list[tuple[float, int]]:
    """Points at this distance, one step each."""
    return [(first + seconds * index, index + 1) for index in range(count)]


STEADY = every(10.0)  # the last at 490 s


@pytest.mark.parametrize(
    ("points", "total", "limit"),
    [
        (STEADY, 1000, 600),  # a first checkpoint or evaluation may take ten minutes
        (every(240.0), 1000, 960),  # slow steps
        ([*STEADY, (790, 21), (800, 22)], 1000, 1200),  # an evaluation, or a checkpoint, took 300 s
        (every(1200.0), 1000, HOUR),  # never longer than stuck_after
        ([], 1000, HOUR),  # the model loads, and the first step compiles
        ([(300, 1)], 1000, HOUR),  # nothing is measured; the second step may compile, too
        (STEADY, 20, HOUR),  # the last step is done: evaluation and export follow
        ([(300, 1), (310, 1), (320, 1)], 1000, HOUR),  # repetitions of a step measure nothing
        ([*STEADY, (1000, 5), (1010, 6)], 1000, 600),  # resumed from a checkpoint: the loading is no step
        ([(300, 1), (290, 2), (310, 3)], 1000, 600),  # the clock was set back
    ],
)
def test_how_long_a_step_may_last_is_measured(points: Points, total: int, limit: float) -> None:
    changes = [now for (_, before), (now, step) in pairwise([(0.0, 0), *points]) if step != before]
    since = changes[-1] if changes else 0.0
    assert found(points, since, total=total).limit_seconds == limit
    for ago, stuck in ((limit - 1, False), (limit, True)):
        assert found(points, since + ago, total=total).is_stuck is stuck


@pytest.mark.parametrize(
    ("stuck_after", "limit"), [("10s", 10), ("5m", 300), ("20m", 600), ("6h", HOUR), ("12h", 2 * HOUR)]
)
def test_stuck_after_is_the_upper_bound_and_its_sixth_the_lower_bound(stuck_after: str, limit: float) -> None:
    assert found(STEADY, 500, stuck_after=stuck_after).limit_seconds == limit


def test_a_container_that_started_again_loads_its_model_again() -> None:
    assert found(STEADY, 490 + 700).is_stuck
    again = found(STEADY, 490 + 700, starts=(0.0, 600.0))
    assert (again.seconds, again.limit_seconds, again.step) == (590.0, HOUR, None)
    assert found(STEADY, 600 + HOUR, starts=(0.0, 600.0)).is_stuck


def test_steps_that_are_trained_again_are_progress() -> None:
    """After a restart from a checkpoint, the steps are lower than before for a while."""
    assert found([*STEADY, (900, 3), (910, 4), (1500, 5)], 1505).seconds == 5


def test_nothing_known_is_no_standstill() -> None:
    assert standstill(None, [], Limits(), BEGAN) is None
    assert standstill(None, [None], Limits(), BEGAN) is None


@pytest.mark.parametrize(
    ("points", "now", "total", "text"),
    [
        (STEADY, 490 + 720, 60, "stuck: no progress for 12 min at step 20 of 60; a step usually takes 10.0 s"),
        (STEADY, 490 + 720, 0, "stuck: no progress for 12 min at step 20; a step usually takes 10.0 s"),
        (STEADY, 490 + 300, 60, "no progress for 5 min at step 20 of 60; a step usually takes 10.0 s; "
         "it counts as stuck after 10 min"),
        (STEADY, 490 + 720, 20, "no progress for 12 min after the last step, 20 of 20; "
         "it evaluates and exports the model, or it hangs; it counts as stuck after 1 h"),
        (STEADY, 490 + 3600, 20, "stuck: no progress for 1 h after the last step, 20 of 20"),
        ([(300, 1)], 360, 60, "no progress for 60.0 s at step 1 of 60; it counts as stuck after 1 h"),
        ([], 3600, 60, "stuck: no step for 1 h after its start"),
    ],
)  # fmt: skip
def test_the_verdict_says_where_how_long_and_what_is_usual(points: Points, now: float, total: int, text: str) -> None:
    assert found(points, now, total=total).verdict == text


@given(
    gaps=st.lists(st.floats(0, 5000), min_size=0, max_size=20),
    quiet=st.floats(0, 20_000),
    minutes=st.integers(1, 24 * 60),
    total=st.integers(0, 25),
    start=st.floats(0, 50_000),
)
def test_no_training_is_stuck_at_its_own_pace_or_lives_beyond_stuck_after(
    gaps: list[float], quiet: float, minutes: int, total: int, start: float
) -> None:
    times = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    points = [(seconds, index + 1) for index, seconds in enumerate(times)]
    now = max([start, *times]) + quiet
    stands = found(points, now, starts=(start,), total=total, stuck_after=f"{minutes}m")
    most = 60.0 * minutes
    assert min(most, LEAST_SECONDS) <= stands.limit_seconds <= most
    assert stands.long_seconds <= stands.limit_seconds
    assert stands.seconds == pytest.approx(quiet, abs=1e-3)
    assert stands.is_stuck is (stands.seconds >= stands.limit_seconds)
    assert stands.is_long or not stands.is_stuck
    if stands.is_stuck and quiet < most:  # earlier than stuck_after: only in the middle of a measured training
        assert len(points) > 1
        assert not 0 < total <= len(points)
        assert quiet > 3.9 * max(gaps[1:])


def record(*, state: RunState = RunState.TRAINING, ended: datetime | None = None) -> Record:
    attempt = Attempt(number=1, placement=0, region="r", started=BEGAN, deadline=at(9e4), seen=BEGAN, ended=ended)
    history = [Transition(state=RunState.ACCEPTED, time=BEGAN), Transition(state=state, time=BEGAN, attempt=1)]
    return Record(run=RUN, name="job", source="s", state=state, created=BEGAN, history=history, attempts=[attempt])


def test_people_are_told_of_a_training_only_while_it_trains_and_stands_still() -> None:
    series = kept(STEADY)
    assert series is not None
    now = at(490 + 61)

    def told(run: Record, series: Kept | None, starts: Sequence[Started] = ()) -> bool:
        return unusual(run, series, starts, Limits(), now) is not None

    again = Started(run=RUN, attempt=1, sequence=9, time=at(500).replace(tzinfo=None))
    assert told(record(), series)
    assert not told(record(), kept([*STEADY, (500, 21)]))
    assert not told(record(), series, [again])
    assert told(record(), series, [again.model_copy(update={"attempt": 2})])
    assert not told(record(ended=now), series)
    assert not told(record(state=RunState.DEPLOYING), series)
    assert not told(record(), None), "before its first step, only stuck_after is the limit"
