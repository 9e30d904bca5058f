"""Stage `sweep`: the cloud's own lists against the records. What nobody owns is deleted, what was lost goes on.

Only runs that are marked as open in the runs bucket, or that have something in the cloud, are looked at: a sweep costs
what there is now, not what there ever was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dropforge.base.log import log
from dropforge.base.settings import settings
from dropforge.cloud.executions import live_executions
from dropforge.run.record import utc_now
from dropforge.run.store import open_store

from . import lost_work, orphans
from .orphans import Deletions, Doomed

T = TypeVar("T")
U = TypeVar("U")

WORKERS = 32  # what is done for a run is a few requests


def sweep() -> dict[str, Any]:
    """Look at everything once. One sweep is enough, and two at once do no harm.

    Answers {"status": "SWEPT", "deleted", "deleting": names of resources, "restarted", "resubmitted": runs,
    "problems": what could not be looked at or done}; each of them is logged, too, as a WARNING unless it was expected.
    """
    look = Look()
    restarted, resubmitted = look.restart(), look.resubmit()
    deletions = look.delete()
    answer = {
        "deleted": [one.name for one in deletions.gone],
        "deleting": [one.name for one in deletions.going],
        "restarted": restarted,
        "resubmitted": resubmitted,
        "problems": look.problems,
    }
    log("swept", stage="sweep", listed=len(look.found), counts={key: len(value) for key, value in answer.items()})
    return {"status": "SWEPT", **answer}


class Look:
    """One look at what the cloud lists, and then at the records of the runs that have something there or are open."""

    def __init__(self) -> None:
        self.settings, self.store, self.now = settings(), open_store(), utc_now()
        self.found, self.problems = orphans.list_all(self.settings)  # before the records: see orphans.py
        self.marks = dict(self.store.open_runs())
        # A record that cannot be read is not here: its run is left alone.
        self.records = dict(self._each(self.store.find, sorted({*self.marks, *(one.run for one in self.found)})))
        # The executions that go on; None when nobody knows.
        self.live = next((answer for _, answer in self._each(live_executions, [self.settings])), None)

    def restart(self) -> list[str]:
        """Have runs go on that no execution goes on with; which."""
        live, begun = self.live, [one for one in self.records.values() if one and not one.state.is_terminal]
        if live is None:
            return []
        answers = self._each(lambda record: lost_work.restart(self.store, record, live, self.settings), begun)
        return [record.run for record, done in answers if done]

    def resubmit(self) -> list[str]:
        """Submit specs that have no run, and what died while it was; which runs that makes."""
        unaccepted = [run for run in self.marks if run in self.records and self.records[run] is None]
        accepted = self._each(lambda run: lost_work.accept(self.store, run, self.marks[run], self.now), unaccepted)
        specs = [blob for _, blobs in self._each(lost_work.specs, [self.settings]) for blob in blobs]
        submitted = self._each(lambda blob: lost_work.submit(self.store, blob, self.settings, self.now), specs)
        return [run for _, run in [*accepted, *submitted] if run]

    def delete(self) -> Deletions:
        """Delete what nobody owns, and close the runs that are over and have left nothing."""
        known = [one for one in self.found if one.run in self.records]
        judged = [Doomed(one, orphans.judge(one, self.records[one.run], self.settings, self.now)) for one in known]
        unowned = [one for one in judged if one.why]
        doomed = [one for one, went in self._each(self._went_meanwhile, unowned) if not went]
        deletions = orphans.delete(doomed, self.store)
        self.problems += deletions.problems
        gone = {one.name for one in deletions.gone}
        unsettled = {one.found.run for one in doomed if one.found.name not in gone}
        self._settle({*self.marks, *(one.run for one in deletions.gone)} - unsettled)
        return deletions

    def _went_meanwhile(self, one: Doomed) -> bool:
        """Whether its run has seen it gone since the lists were begun: it was there then, and nobody has left it."""
        entry = self.store.ledger(one.found.run).find(one.found.name)
        return entry is not None and entry.gone is not None and entry.gone > self.now

    def _settle(self, runs: set[str]) -> None:
        over = [one for run, one in self.records.items() if one and one.state.is_terminal and run in runs]
        listed = frozenset(one.name for one in self.found)
        self._each(
            lambda record: lost_work.settle(self.store, record, listed, self.live, self.settings, self.now), over
        )

    def _each(self, call: Callable[[T], U], items: Iterable[T]) -> list[tuple[T, U]]:
        """What `call` answers for each item, with the item; one that fails is a problem, and spares the others."""
        with ThreadPoolExecutor(WORKERS) as pool:
            answers = list(pool.map(lambda item: _attempt(call, item), items))
        self.problems += [answer for answer in answers if isinstance(answer, str)]
        return [answer for answer in answers if not isinstance(answer, str)]


def _attempt(call: Callable[[T], U], item: T) -> tuple[T, U] | str:
    """The item and the answer, or what went wrong."""
    try:
        return item, call(item)
    except Exception as error:  # noqa: BLE001  # what nobody has foreseen of one spares the others, too
        what = getattr(item, "run", None) or getattr(item, "name", None) or item
        problem = f"{what if isinstance(what, str) else 'the sweep'}: {error!r}"[:500]
        log(problem, stage="sweep", severity="ERROR")
        return problem
