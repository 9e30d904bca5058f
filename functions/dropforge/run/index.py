"""The index of all runs: the summaries in the metadata of their records (run/summary.py).

A record without a summary that can be believed is read itself: the index makes lists fast, and never wrong.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from dropforge.base.errors import Malformed, NotFound
from dropforge.spec import JobSpec

from .record import About
from .store import RunStore
from .summary import Summary

READERS = 16  # parallel requests


class Index(NamedTuple):
    """The summary of every run, newest first, and why this version cannot read some records."""

    summaries: list[Summary]
    unreadable: list[Malformed]


def about(spec: JobSpec, most_usd: float | None) -> About:
    """The part of a spec that lists of runs show. `most_usd` is the most that its run costs, at present prices."""
    gate = spec.evaluation.gate if spec.evaluation else None
    return About(
        target=spec.target.type,
        model=spec.model.source,
        labels=spec.labels,
        metric=gate.metric if gate else "",
        most_usd=most_usd,
    )


def read_index(store: RunStore) -> Index:
    """The summaries of all runs: one request for 1,000 runs, and up to two more for each run without a summary."""
    found: list[Summary | Malformed | None] = []
    missing = []
    with uncollected():
        for listed in store.listed():
            summary = listed.summary
            found.append(summary)
            if summary is None:
                missing.append(listed.run)
    with ThreadPoolExecutor(READERS) as pool:
        found += pool.map(lambda run: _summary_or_problem(store, run), missing)
    summaries = [summary for summary in found if isinstance(summary, Summary)]
    summaries.sort(key=lambda summary: summary.created, reverse=True)
    return Index(summaries, [problem for problem in found if isinstance(problem, Malformed)])


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause Python's collector of cycles.

    Summaries have no cycles and stay. The collector looks at all of them again and again while their number grows:
    that is half the time of reading 10,000. (`gc.freeze` would also exempt the garbage of the whole process for ever.)
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_summary(store: RunStore, run: str) -> Summary:
    """The summary of the present record of a run. Raises NotFound and Malformed."""
    return Summary.of(store.record(run))


def _summary_or_problem(store: RunStore, run: str) -> Summary | Malformed | None:
    try:
        return read_summary(store, run)
    except NotFound:
        return None
    except Malformed as error:
        return error
