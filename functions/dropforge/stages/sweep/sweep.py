"""Stage `sweep`: compare the cloud's lists with the records. Delete orphans, and continue lost work.

A sweep looks only at runs with an open mark or with resources in the cloud: its cost depends on the present runs, not
on all runs that ever existed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import NamedTuple, TypeVar

from dropforge.base.names import OPEN_PREFIX
from dropforge.base.redact import cut
from dropforge.cloud.executions import live_executions
from dropforge.cloud.listing import Listed
from dropforge.context import Context
from dropforge.run.record import Record
from dropforge.stages import places
from dropforge.stages.answers import Swept

from . import cursor, findings, lost_work, named, orphans
from .findings import Findings
from .orphans import Deletions, Orphan

T = TypeVar("T")
U = TypeVar("U")

WORKERS = 32  # a run needs only a few requests
BATCH = 64  # between two looks at the clock
# Seconds since the sweep began. A function has 540 s; the deletions before have orphans.PATIENCE_SECONDS.
MARKS_UNTIL = 380.0
SPECS_UNTIL = 460.0
MOST_PROBLEMS = 1000  # in an answer; the log has all
SHOWN = 5  # of many objects with the same problem


def sweep(context: Context) -> Swept:
    """Look at everything once. Two sweeps at the same time do no harm.

    Resources cost money, so their deletion comes first: it waits neither for open marks nor for specs, however many
    there are. Then each phase has its share of the time, and the next sweep continues where a phase stopped.
    Every problem and every orphan is also logged, as a WARNING or ERROR unless it is expected.
    """
    look = Look(context)
    deletions = look.delete()
    before = cursor.read(context)
    rollouts = look.tend_endpoints()
    look.find_places()
    tended = look.tend(before.run)
    look.repair_places()
    between = before._replace(run=tended.stopped)
    cursor.write(context, before, between)
    submitted = look.submit(before.spec)
    cursor.write(context, between, between._replace(spec=submitted.stopped))
    answer = Swept(
        deleted=[resource.name for resource in deletions.gone],
        deleting=[resource.name for resource in deletions.pending],
        restarted=[*tended.restarted, *rollouts],
        resubmitted=[*tended.accepted, *submitted.runs],
        problems=look.problems[:MOST_PROBLEMS],
    )
    found = findings.of(answer, context.now())
    look.keep(found)
    context.log("swept", stage="sweep", listed=len(look.resources), counts=found.counts)
    return answer


def _strays(strays: list[str]) -> str:
    shown = ", ".join(cut(repr(name), 120) for name in strays[:SHOWN])
    return f"{len(strays)} objects below {OPEN_PREFIX} are not marks of runs and were ignored: {shown}"


class Tended(NamedTuple):
    """The runs that were restarted and accepted, and the last run that was looked at if others remain, else ""."""

    restarted: list[str]
    accepted: list[str]
    stopped: str


class Submitted(NamedTuple):
    """The runs of the submitted specs, and the last spec that was looked at if others remain, else ""."""

    runs: list[str]
    stopped: str


class Look:
    """One look at the resources in the cloud, and then at the records of runs with resources or with an open mark."""

    def __init__(self, context: Context) -> None:
        self.context, self.now = context, context.now()
        self.began = context.cloud.clock.monotonic()
        # Before the records: see orphans.py.
        listed, self.problems = orphans.list_all(context.cloud, context.platforms)
        self.resources = [resource for resource in listed if not resource.endpoint]
        self.services = [resource for resource in listed if resource.endpoint]
        # A run whose record cannot be read is not in this map: the sweep leaves the run alone.
        self.records = self._read({resource.run for resource in self.resources})
        self.gone: set[str] = set()  # runs with a resource that this sweep has deleted
        self.unsettled: set[str] = set()  # runs with an orphan that is not deleted yet

    def delete(self) -> Deletions:
        """Delete orphans, and endpoints past their ttl."""
        known = [resource for resource in self.resources if resource.run in self.records]
        judged = [Orphan(resource, self._judge(resource)) for resource in known]
        unowned = [orphan for orphan in judged if orphan.reason]
        to_delete = [orphan for orphan, is_gone in self._for_each(self._is_gone, unowned) if not is_gone]
        deletions = orphans.delete_orphans(self.context, to_delete)
        self.problems += deletions.problems
        gone = {resource.name for resource in deletions.gone}
        self.gone = {resource.run for resource in deletions.gone}
        self.unsettled = {orphan.resource.run for orphan in to_delete if orphan.resource.name not in gone}
        return deletions

    def tend_endpoints(self) -> list[str]:
        """Continue the rollouts of named endpoints, and end those past their expiry; return their ids."""
        context, now = self.context, self.now
        if not context.settings.rollout_workflow:
            return []
        found = {name for _, known in self._for_each(lambda c: list(c.endpoints.names()), [context]) for name in known}
        every = found | {resource.endpoint for resource in self.services}
        services = {name: [each for each in self.services if each.endpoint == name] for name in every}
        tended = self._for_each(lambda name: named.tend(context, name, services[name], now), sorted(services))
        return [begun for _, begun in tended if begun]

    def tend(self, after: str = "") -> Tended:
        """Settle finished runs, restart lost ones and accept unaccepted ones, until MARKS_UNTIL.

        Runs with resources come first, then those with an open mark, in the order of their ids, from the run `after`.
        """
        marks, strays = self.context.store.marks()
        if strays:
            self.problems.append(_strays(strays))
        live = next((live for _, live in self._for_each(live_executions, [self.context.cloud])), None)
        tended = self._tend(sorted(self.records), marks, live)._replace(stopped=after)
        others = sorted(set(marks) - set(self.records))
        for batch in _batches(_from(others, after, str)):
            if self._is_after(MARKS_UNTIL):
                return tended
            self.records |= self._read(batch)
            part = self._tend(batch, marks, live)
            tended = Tended([*tended.restarted, *part.restarted], [*tended.accepted, *part.accepted], batch[-1])
        return tended._replace(stopped="")

    def find_places(self) -> None:
        """Read the records of the runs that hold or wait for a place of the policy."""
        for _, runs in self._for_each(places.known_runs, [self.context]):
            self.records |= self._read(runs - set(self.records))

    def repair_places(self) -> None:
        """Correct who holds a place by the records that were read."""
        self._for_each(lambda context: places.repair(context, self.records), [self.context])

    def submit(self, after: str = "") -> Submitted:
        """Submit specs without a run, in the order of their names from the spec `after`, until SPECS_UNTIL."""
        context = self.context
        found = [blob for _, blobs in self._for_each(lost_work.specs, [context.cloud]) for blob in blobs]
        recent = [blob for blob in found if lost_work.may_be_lost(blob, self.now)]
        runs: list[str] = []
        stopped = ""
        for batch in _batches(_from(recent, after, lambda blob: str(blob.name))):
            if self._is_after(SPECS_UNTIL):
                return Submitted(runs, stopped or after)
            submitted = self._for_each(lambda blob: lost_work.submit(context, blob, self.now), batch)
            runs += [run for _, run in submitted if run]
            stopped = str(batch[-1].name)
        return Submitted(runs, "")

    def keep(self, found: Findings) -> None:
        """Keep the findings of this sweep in the bucket. If the bucket refuses them, the work itself is still done."""
        self._for_each(lambda context: findings.write(context, found), [self.context])

    def _tend(self, runs: list[str], marks: dict[str, datetime], live: frozenset[str] | None) -> Tended:
        """Settle, restart and accept these runs; without the live executions nothing is restarted."""
        context = self.context
        present = {run: self.records[run] for run in runs if run in self.records}
        records = [record for record in present.values() if record is not None]
        listed = frozenset(resource.name for resource in self.resources)
        finished = [record for record in records if record.state.is_terminal and self._is_to_settle(record.run, marks)]
        self._for_each(lambda record: lost_work.settle(context, record, listed, live, self.now), finished)
        unfinished = [record for record in records if not record.state.is_terminal] if live is not None else []
        restarted = self._for_each(lambda record: lost_work.restart(context, record, live or frozenset()), unfinished)
        unaccepted = [run for run, record in present.items() if record is None and run in marks]
        accepted = self._for_each(lambda run: lost_work.accept(context, run, marks[run], self.now), unaccepted)
        return Tended([record.run for record, done in restarted if done], [run for _, run in accepted if run], "")

    def _is_to_settle(self, run: str, marks: dict[str, datetime]) -> bool:
        return (run in marks or run in self.gone) and run not in self.unsettled

    def _read(self, runs: Iterable[str]) -> dict[str, Record | None]:
        return dict(self._for_each(self.context.store.find, sorted(runs)))

    def _is_after(self, seconds: float) -> bool:
        return self.context.cloud.clock.monotonic() - self.began > seconds

    def _judge(self, resource: Listed) -> str:
        return orphans.judge(resource, self.records[resource.run], self.context.settings, self.now)

    def _is_gone(self, orphan: Orphan) -> bool:
        """Whether the run has noted the deletion after the lists began: then no deletion is left to do."""
        entry = self.context.store.ledger(orphan.resource.run).find(orphan.resource.name)
        return entry is not None and entry.gone is not None and entry.gone > self.now

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
            problem = f"{name if isinstance(name, str) else 'the sweep'}: {cut(repr(error), 400)}"
            self.context.log(problem, stage="sweep", severity="ERROR")
            return problem


def _from(items: list[T], after: str, name: Callable[[T], str]) -> list[T]:
    """The items, which are in the order of their names, from the first after `after` round to that again."""
    start = bisect_right([name(item) for item in items], after)
    return [*items[start:], *items[:start]]


def _batches(items: list[T]) -> Iterator[list[T]]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))
