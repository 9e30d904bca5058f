"""Handles what is due: sleeps and time-outs, polls of connectors, executions that run longer than the limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..database import Database
from ..errors import limit_error
from ..interpreter.answers import timer_result
from ..lease import Lease
from ..limits import Limits
from ..store import Store
from .effect_tasks import EffectTasks
from .inbox import Answer, Inbox
from .machines import Machines
from .timer import Timer


class Deadlines:
    def __init__(
        self,
        db: Database,
        store: Store,
        lease: Lease,
        inbox: Inbox,
        timer: Timer,
        machines: Machines,
        effects: EffectTasks,
        limits: Limits,
        now: Callable[[], float],
    ) -> None:
        self._db = db
        self._store = store
        self._lease = lease
        self._inbox = inbox
        self._timer = timer
        self._machines = machines
        self._effects = effects
        self._limits = limits
        self._now = now

    def next_due(self) -> float | None:
        """The earliest moment at which a wait is due or an execution reaches its longest duration."""
        oldest = self._store.oldest_start()
        deadline = None if oldest is None else oldest + self._limits.duration_seconds
        return min((moment for moment in (self._store.next_due(), deadline) if moment is not None), default=None)

    def handle_due(self) -> None:
        """Answer every due wait, poll every due operation, fail every execution that is over its duration."""
        now = self._now()
        pending = self._inbox.pending()
        due = self._store.due(now)
        polls = [(id_, replace(wait, due=None)) for id_, wait in due if wait.kind == "connector"]
        if polls:
            with self._db.transaction():
                self._lease.check()
                self._store.begin_polls((id_, wait.thread) for id_, wait in polls)
            self._effects.dispatch(polls)
        for id_, wait in due:
            if wait.kind != "connector" and (id_, wait.thread, wait.seq) not in pending:
                self._inbox.put(Answer(id_, wait.thread, wait.seq, *timer_result(wait)))
        for id_ in self._store.started_before(now - self._limits.duration_seconds):
            self._expire(id_)
        self._inbox.wake()
        assert self._inbox.loop is not None
        self._inbox.loop.call_soon(self._timer.reschedule)

    def _expire(self, id_: int) -> None:
        active = self._machines.get(id_)
        if active is not None and active.machine.outcome is None:
            active.machine.fail(limit_error(f"the execution ran for {self._limits.duration_seconds} seconds"))
            self._inbox.make_runnable(id_)
