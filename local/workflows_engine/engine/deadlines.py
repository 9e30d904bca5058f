"""Handles what is due: sleeps and time-outs, polls of connectors, executions that run longer than the limit."""

from __future__ import annotations

from dataclasses import replace

from ..errors import limit_error
from ..interpreter.answers import timer_result
from .core import Core
from .effect_tasks import EffectTasks
from .inbox import Answer
from .machines import Machines
from .timer import Timer


class Deadlines:
    def __init__(self, core: Core, timer: Timer, machines: Machines, effects: EffectTasks) -> None:
        self._core = core
        self._timer = timer
        self._machines = machines
        self._effects = effects

    def next_due(self) -> float | None:
        """The earliest moment at which a wait is due or an execution reaches its longest duration."""
        oldest = self._core.store.oldest_start()
        deadline = None if oldest is None else oldest + self._core.limits.duration_seconds
        return min((moment for moment in (self._core.store.next_due(), deadline) if moment is not None), default=None)

    def handle_due(self) -> None:
        """Answer every due wait, poll every due operation, fail every execution that is over its duration."""
        now = self._core.now()
        pending = self._core.inbox.pending()
        due = self._core.store.due(now)
        polls = [(id_, replace(wait, due=None)) for id_, wait in due if wait.kind == "connector"]
        if polls:
            with self._core.owned_transaction():
                self._core.store.begin_polls((id_, wait.thread) for id_, wait in polls)
            self._effects.dispatch(polls)
        for id_, wait in due:
            if wait.kind != "connector" and (id_, wait.thread, wait.seq) not in pending:
                self._core.inbox.put(Answer(id_, wait.thread, wait.seq, *timer_result(wait)))
        for id_ in self._core.store.started_before(now - self._core.limits.duration_seconds):
            self._expire(id_)
        self._core.inbox.wake()
        assert self._core.inbox.loop is not None
        self._core.inbox.loop.call_soon(self._timer.reschedule)

    def _expire(self, id_: int) -> None:
        active = self._machines.get(id_)
        if active is not None and active.machine.outcome is None:
            active.machine.fail(limit_error(f"the execution ran for {self._core.limits.duration_seconds} seconds"))
            self._core.inbox.make_runnable(id_)
