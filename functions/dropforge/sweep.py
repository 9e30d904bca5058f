"""Stage `sweep`: the cloud's own lists against the records. What nobody owns is deleted, what was lost goes on.

Only runs that are marked as open in the runs bucket, or that have something in the cloud, are looked at: a sweep costs
what there is now, not what there ever was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from . import lost_work, orphans
from .classify import client_errors
from .errors import DropforgeError
from .executions import live_executions
from .log import log
from .orphans import Doomed
from .runs import open_store, utc_now
from .settings import settings

T = TypeVar("T")
U = TypeVar("U")

WORKERS = 32  # what is done for a run is a few requests


def sweep() -> dict[str, Any]:
    """Look at everything once. One sweep is enough, and two at once do no harm.

    Answers {"status": "SWEPT", "deleted", "deleting": names of resources, "restarted", "resubmitted": runs,
    "problems": what could not be looked at or done}; each of them is logged, too, as a WARNING unless it was expected.
    """
    deployment, store, now = settings(), open_store(), utc_now()
    found, problems = orphans.list_all(deployment)  # before the records: see orphans.py
    marks = dict(store.open_runs())
    runs = sorted({*marks, *(one.run for one in found)})
    # A record that cannot be read is not here: its run is left alone.
    records = dict(_each(problems, store.find, runs))

    live = next((answer for _, answer in _each(problems, live_executions, [deployment])), None)
    begun = [record for record in records.values() if record and not record.state.is_terminal]
    restarted: list[str] = []
    if live is not None:
        answers = _each(problems, lambda record: lost_work.restart(store, record, live, deployment), begun)
        restarted = [record.run for record, done in answers if done]

    unaccepted = [run for run, since in marks.items() if run in records and records[run] is None]
    accepted = _each(problems, lambda run: lost_work.accept(store, run, marks[run], now), unaccepted)
    specs = [blob for _, blobs in _each(problems, lost_work.specs, [deployment]) for blob in blobs]
    submitted = _each(problems, lambda blob: lost_work.submit(store, blob, deployment, now), specs)
    resubmitted = [run for _, run in [*accepted, *submitted] if run]

    judged = [Doomed(one, orphans.judge(one, records[one.run], deployment, now)) for one in found if one.run in records]
    doomed = [one for one in judged if one.why]
    deletions = orphans.delete(doomed, store)

    gone = {one.name for one in deletions.gone}
    unsettled = {one.found.run for one in doomed if one.found.name not in gone}
    touched = {*marks, *(one.run for one in deletions.gone)} - unsettled
    over = [record for run, record in records.items() if record and record.state.is_terminal and run in touched]
    _each(problems, lambda record: lost_work.settle(store, record, live, deployment, now), over)
    answer = {
        "deleted": [one.name for one in deletions.gone],
        "deleting": [one.name for one in deletions.going],
        "restarted": restarted,
        "resubmitted": resubmitted,
        "problems": [*problems, *deletions.problems],
    }
    log("swept", stage="sweep", listed=len(found), counts={key: len(value) for key, value in answer.items()})
    return {"status": "SWEPT", **answer}


def _each(problems: list[str], call: Callable[[T], U], items: Iterable[T]) -> list[tuple[T, U]]:
    """What `call` answers for each item, with the item; one that fails is a problem, and spares the others."""
    failures: tuple[type[Exception], ...] = (*client_errors(), DropforgeError, ValueError)

    def attempt(item: T) -> tuple[T, U] | str:
        try:
            return item, call(item)
        except failures as error:
            what = getattr(item, "run", None) or getattr(item, "name", None) or item
            problem = f"{what if isinstance(what, str) else 'the sweep'}: {error!r}"[:500]
            log(problem, stage="sweep", severity="ERROR")
            return problem

    with ThreadPoolExecutor(WORKERS) as pool:
        answers = list(pool.map(attempt, items))
    problems += [answer for answer in answers if isinstance(answer, str)]
    return [answer for answer in answers if not isinstance(answer, str)]
