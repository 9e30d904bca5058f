"""The index of all runs: the summaries in the metadata of their records (run/summary.py), and how it is rebuilt.

A record without a summary that can be believed is read itself: the index makes lists fast, and never wrong.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple

from .base.errors import Malformed, NotFound
from .money import most_usd
from .run.record import About, Record
from .run.store import Listed, RunStore
from .run.summary import Summary, text_of
from .spec import JobSpec

READERS = 16  # parallel requests


class Index(NamedTuple):
    """The summary of every run, newest first, and why this version cannot read some records."""

    summaries: list[Summary]
    unreadable: list[Malformed]


class Finding(StrEnum):
    """The result of comparing the metadata of a record with the record."""

    RIGHT = "right"
    MISSING = "missing"  # the record was written before there were summaries
    WRONG = "wrong"  # something else than the control plane wrote it
    UNREADABLE = "unreadable"


class Checked(NamedTuple):
    """A run whose summary was compared. `problem`: the reason why the record cannot be read, or ""."""

    run: str
    finding: Finding
    problem: str = ""


def about(spec: JobSpec) -> About:
    """The part of a spec that lists of runs show."""
    gate = spec.evaluation.gate if spec.evaluation else None
    return About(
        target=spec.target.type,
        model=spec.model.source,
        labels=spec.labels,
        metric=gate.metric if gate else "",
        most_usd=most_usd(spec),
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
    record = store.record(run)
    return Summary.of(record, _about(store, record))


def rebuild(store: RunStore, *, write: bool = True) -> Iterator[Checked]:
    """Compare the summary of every run with its record, and write each that is not right, unless `write` is false.

    A summary is written with its record, on the condition that nobody has changed the record: a rebuild is safe beside
    running runs, may be killed at any moment, and writes nothing if all summaries are right.
    """
    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(lambda listed: _rebuild_one(store, listed, write), list(store.listed()))


def _rebuild_one(store: RunStore, listed: Listed, write: bool) -> Checked:
    run, finding = listed.run, Finding.WRONG if listed.text else Finding.MISSING
    try:
        record, generation = store.record_and_generation(run)
        if generation != listed.generation and text_of(record):
            return Checked(run, Finding.RIGHT)  # a function has written record and summary meanwhile
        found = _about(store, record)
        expected = text_of(record.model_copy(update={"about": found}))
        if listed.text == expected and (listed.is_as_written or not expected):
            return Checked(run, Finding.RIGHT)
        if write:
            store.update(run, lambda latest: latest.model_copy(update={"about": latest.about or found}))
    except NotFound:
        return Checked(run, Finding.RIGHT)  # the run was deleted meanwhile, and its summary with it
    except Malformed as error:
        return Checked(run, Finding.UNREADABLE, str(error))
    return Checked(run, finding)


def _about(store: RunStore, record: Record) -> About | None:
    """The part of a run's spec for lists; None for a run that was never accepted, and for an unreadable spec."""
    if record.about is not None or not record.was_accepted:
        return record.about
    try:
        return about(store.spec(record.run))
    except (NotFound, Malformed):
        return None


def _summary_or_problem(store: RunStore, run: str) -> Summary | Malformed | None:
    try:
        return read_summary(store, run)
    except NotFound:
        return None
    except Malformed as error:
        return error
