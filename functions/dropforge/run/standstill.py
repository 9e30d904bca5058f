"""Whether a training makes progress: the one rule for a stuck attempt, for its message, the terminal and the console.

Progress is another step. How long a step may last is measured: the series of the attempt has the longest time between
two of its points so far, and evaluations, checkpoints and slow steps are in it. Nothing is measured while the model
loads and the first step compiles, and none is counted while the model is evaluated and exported after the last step.
There, only `limits.stuck_after` is the limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from dropforge.base.figures import duration
from dropforge.spec import Limits, seconds

from .events import Started
from .record import Record, RunState
from .series import Kept, Series

TIMES = 4  # the longest time between two points so far: a longer time without progress is unusual
LONG_SECONDS = 60.0  # a shorter time without progress is not worth a word
# A first checkpoint or evaluation takes longer than any step before it. With a larger stuck_after, it may take longer.
LEAST_SECONDS, LEAST_SHARE = 600.0, 1 / 6


class Standstill(NamedTuple):
    """How long a training has made no progress, and how long it may.

    `step` is None before the first step after a start. `usual_seconds`: how long a step takes, as the median; None if
    no step was measured. After `long_seconds` people are told, and after `limit_seconds` the attempt is stuck.
    """

    seconds: float
    long_seconds: float
    limit_seconds: float
    step: int | None = None
    total_steps: int = 0
    usual_seconds: float | None = None

    @property
    def is_long(self) -> bool:
        return self.seconds >= self.long_seconds

    @property
    def is_stuck(self) -> bool:
        return self.seconds >= self.limit_seconds

    @property
    def text(self) -> str:
        """Text like `no progress for 12 min at step 30 of 60; a step usually takes 2.1 s`."""
        lasted = duration(self.seconds)
        if self.step is None:
            return f"no step for {lasted} after its start"
        if _is_last(self.step, self.total_steps):
            return f"no progress for {lasted} after the last step, {self.step} of {self.total_steps}"
        at = f"step {self.step} of {self.total_steps}" if self.total_steps else f"step {self.step}"
        usual = "" if self.usual_seconds is None else f"; a step usually takes {duration(self.usual_seconds)}"
        return f"no progress for {lasted} at {at}{usual}"

    @property
    def verdict(self) -> str:
        """The text, followed by the limit: the attempt is stuck, or counts as stuck after so long."""
        if self.is_stuck:
            return f"stuck: {self.text}"
        exports = self.step is not None and _is_last(self.step, self.total_steps)
        now = "; it evaluates and exports the model, or it hangs" * exports
        return f"{self.text}{now}; it counts as stuck after {duration(self.limit_seconds)}"


def standstill(
    kept: Kept | None, starts: Iterable[datetime | None], limits: Limits, now: datetime
) -> Standstill | None:
    """How long an attempt has made no progress; None if nothing is known of it.

    `kept` is its series, and `starts` are the times at which it was seen to start, or to start again, as far as known.
    """
    started = max((start for start in starts if start is not None), default=None)
    most = float(seconds(limits.stuck_after))
    advanced = kept.advanced() if kept else None
    if kept is None or advanced is None or (started is not None and started > advanced):
        return None if started is None else Standstill(_past(started, now), most, most)
    series = kept.series
    step, gaps = series.step[-1], _gaps(series)
    longest = max((gap for _, gap in gaps), default=0.0)
    is_measured = gaps and not _is_last(step, series.total_steps)
    least = max(LEAST_SECONDS, LEAST_SHARE * most)
    limit = min(most, max(least, TIMES * longest)) if is_measured else most
    usual = median(gap / steps for steps, gap in gaps) if gaps else None
    long = min(limit, max(LONG_SECONDS, TIMES * longest))
    return Standstill(_past(advanced, now), long, limit, step, series.total_steps, usual)


def unusual(
    record: Record, kept: Kept | None, starts: Iterable[Started], limits: Limits, now: datetime
) -> Standstill | None:
    """How long the present attempt has made no progress, for people; None unless it trains, and that is long.

    `kept` is its series. `starts` may be of all attempts.
    """
    if record.state is not RunState.TRAINING or record.attempts[-1].ended:
        return None
    attempt = record.attempts[-1]
    times = [attempt.seen, *(event.at for event in starts if event.attempt == attempt.number)]
    found = standstill(kept, times, limits, now)
    return found if found is not None and found.is_long else None


def _past(since: datetime, now: datetime) -> float:
    return max(timedelta(0), now - since).total_seconds()


def _is_last(step: int, total_steps: int) -> bool:
    return 0 < total_steps <= step


def _gaps(series: Series) -> list[tuple[int, float]]:
    """The steps and the seconds between two changes of the step. Where it falls, a container has started again."""
    changes = pairwise(series.changes())
    gaps = ((series.step[b] - series.step[a], series.seconds[b] - series.seconds[a]) for a, b in changes)
    return [(steps, gap) for steps, gap in gaps if steps > 0 and gap >= 0]
