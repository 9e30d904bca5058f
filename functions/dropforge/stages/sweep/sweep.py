"""Stage `sweep`: compare the cloud's lists with the records. Delete orphans, and continue lost work.

A sweep looks only at runs with an open mark or with resources in the cloud: its cost depends on the present runs, not
on all runs that ever existed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from dropforge.base.names import OPEN_PREFIX
from dropforge.cloud.executions import live_executions
from dropforge.cloud.listing import Listed
from dropforge.context import Context
from dropforge.stages.answers import Swept

from . import lost_work, orphans
from .orphans import Deletions, Orphan

T = TypeVar("T")
U = TypeVar("U")

WORKERS = 32  # a run needs only a few requests
SHOWN = 5  # of many objects with the same problem


def sweep(context: Context) -> Swept:
    """Look at everything once. Two sweeps at the same time do no harm.

    Every problem and every orphan is also logged, as a WARNING or ERROR unless it is expected.
    """
    look = Look(context)
    restarted, resubmitted = look.restart(), look.resubmit()
    deletions = look.delete()
    answer = Swept(
        deleted=[resource.name for resource in deletions.gone],
        deleting=[resource.name for resource in deletions.pending],
        restarted=restarted,
        resubmitted=resubmitted,
        problems=look.problems,
    )
    counts = {name: len(value) for name, value in answer.model_dump().items()}
    context.log("swept", stage="sweep", listed=len(look.resources), counts=counts)
    return answer


def _strays(strays: list[str]) -> str:
    shown = ", ".join(repr(name)[:120] for name in strays[:SHOWN])
    return f"{len(strays)} objects below {OPEN_PREFIX} are no mark of a run and were ignored: {shown}"


class Look:
    """One look at the resources in the cloud, and then at the records of runs with resources or with an open mark."""

    def __init__(self, context: Context) -> None:
        self.context, self.now = context, context.now()
        # Before the records: see orphans.py.
        self.resources, self.problems = orphans.list_all(context.cloud, context.platforms)
        self.marks, strays = context.store.marks()
        if strays:
            self.problems.append(_strays(strays))
        # A run whose record cannot be read is not in this map: the sweep leaves the run alone.
        runs = sorted({*self.marks, *(resource.run for resource in self.resources)})
        self.records = dict(self._for_each(context.store.find, runs))
        # The live executions; None if they could not be listed.
        self.live = next((live for _, live in self._for_each(live_executions, [context.cloud])), None)

    def restart(self) -> list[str]:
        """Restart unfinished runs without a live execution; return their ids."""
        live, context = self.live, self.context
        if live is None:
            return []
        unfinished = [record for record in self.records.values() if record and not record.state.is_terminal]
        answers = self._for_each(lambda record: lost_work.restart(context, record, live), unfinished)
        return [record.run for record, is_restarted in answers if is_restarted]

    def resubmit(self) -> list[str]:
        """Submit specs without a run, and finish interrupted submissions; return the ids of the runs."""
        context = self.context
        unaccepted = [run for run in self.marks if run in self.records and self.records[run] is None]
        accepted = self._for_each(lambda run: lost_work.accept(context, run, self.marks[run], self.now), unaccepted)
        specs = [blob for _, blobs in self._for_each(lost_work.specs, [context.cloud]) for blob in blobs]
        submitted = self._for_each(lambda blob: lost_work.submit(context, blob, self.now), specs)
        return [run for _, run in [*accepted, *submitted] if run]

    def delete(self) -> Deletions:
        """Delete orphans, then settle the finished runs without remaining orphans."""
        known = [resource for resource in self.resources if resource.run in self.records]
        judged = [Orphan(resource, self._judge(resource)) for resource in known]
        unowned = [orphan for orphan in judged if orphan.reason]
        to_delete = [orphan for orphan, is_gone in self._for_each(self._is_gone, unowned) if not is_gone]
        deletions = orphans.delete_orphans(self.context, to_delete)
        self.problems += deletions.problems
        gone = {resource.name for resource in deletions.gone}
        unsettled = {orphan.resource.run for orphan in to_delete if orphan.resource.name not in gone}
        self._settle({*self.marks, *(resource.run for resource in deletions.gone)} - unsettled)
        return deletions

    def _judge(self, resource: Listed) -> str:
        return orphans.judge(resource, self.records[resource.run], self.context.settings, self.now)

    def _is_gone(self, orphan: Orphan) -> bool:
        """Whether the run has noted the deletion after the lists began: then no deletion is left to do."""
        entry = self.context.store.ledger(orphan.resource.run).find(orphan.resource.name)
        return entry is not None and entry.gone is not None and entry.gone > self.now

    def _settle(self, runs: set[str]) -> None:
        finished = [
            record for run, record in self.records.items() if record and record.state.is_terminal and run in runs
        ]
        listed = frozenset(resource.name for resource in self.resources)
        self._for_each(lambda record: lost_work.settle(self.context, record, listed, self.live, self.now), finished)

    def _for_each(self, call: Callable[[T], U], items: Iterable[T]) -> list[tuple[T, U]]:
        """Each item with the result of `call`. A failed call becomes a problem and does not stop the others."""
        answers = self.context.cloud.threads.map(lambda item: self._attempt(call, item), items, WORKERS)
        self.problems += [answer for answer in answers if isinstance(answer, str)]
        return [answer for answer in answers if not isinstance(answer, str)]

    def _attempt(self, call: Callable[[T], U], item: T) -> tuple[T, U] | str:
        """The item with its result, or a description of the failure."""
        try:
            return item, call(item)
        except Exception as error:  # noqa: BLE001  # an unforeseen error of an item must not stop the others
            name = getattr(item, "run", None) or getattr(item, "name", None) or item
            problem = f"{name if isinstance(name, str) else 'the sweep'}: {error!r}"[:500]
            self.context.log(problem, stage="sweep", severity="ERROR")
            return problem
