"""Rounds: the only place where executions advance.

A round takes the answers that arrived, runs every execution that can continue, writes all of them in a single
transaction (group commit), and only then starts the new effects. What is in memory can be lost at any time.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..effects import logs
from ..errors import LeaseLost
from ..interpreter.waits import Wait
from .callbacks import Callbacks
from .core import Core
from .effect_tasks import EffectTasks
from .executions import Executions
from .inbox import Answer, WaitKey
from .machines import ActiveExecution, Machines

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.2  # after a commit that the database refused


class Rounds:
    """`create(workflow, argument, parent)` starts a sub-execution."""

    def __init__(
        self,
        core: Core,
        machines: Machines,
        executions: Executions,
        callbacks: Callbacks,
        effects: EffectTasks,
        create: Callable[[str, str, WaitKey], object],
    ) -> None:
        self._core = core
        self._machines = machines
        self._executions = executions
        self._callbacks = callbacks
        self._effects = effects
        self._create = create

    def run(self) -> None:
        """Do a round; on failure, isolate the execution that causes it."""
        answers, runnable = self._core.inbox.take()
        try:
            self._advance(answers, runnable)
        except LeaseLost:
            self._core.inbox.lose_lease()
            for answer in answers:
                answer.settle(False)
        except sqlite3.Error:
            log.exception("the database refused a commit; the engine tries again")
            self._machines.clear()  # the machines in memory are ahead of the database
            self._core.inbox.put_back(answers, runnable, RETRY_SECONDS)
            return
        except Exception:  # an execution that cannot advance must not stop the others
            log.exception("an execution cannot be advanced")
            self._machines.clear()
            self._isolate(answers, runnable)
        self._core.inbox.wake_if_work()
        self._machines.trim()

    def _isolate(self, answers: Sequence[Answer], runnable: Mapping[int, None]) -> None:
        """Advance each execution in a round of its own, and fail those that raise."""
        for id_ in {answer.execution for answer in answers} | set(runnable):
            try:
                self._advance([answer for answer in answers if answer.execution == id_], {id_: None})
            except (LeaseLost, sqlite3.Error):
                raise
            except Exception as defect:  # noqa: BLE001  # the execution's error reports the defect to its owner
                self._machines.clear()
                self._fail(id_, defect)

    def _fail(self, id_: int, defect: Exception) -> None:
        text = f"SystemError: {type(defect).__name__}: {defect}"
        error = {"payload": json.dumps({"message": text, "tags": ["SystemError"]}), "context": text}
        with self._core.owned_transaction():
            self._core.store.finish(id_, "FAILED", result=None, error=error, now=self._core.now())
        self._effects.forget(id_)
        self._executions.after_finish(id_)
        record = self._core.store.execution_by_id(id_)
        self._executions.notify(record.name if record else "")

    def _advance(self, answers: Sequence[Answer], runnable: Mapping[int, None]) -> None:
        touched: dict[int, ActiveExecution] = {}
        taken: list[tuple[Answer, bool]] = []
        for answer in answers:
            active = touched.get(answer.execution) or self._machines.get(answer.execution)
            is_accepted = active is not None and active.machine.complete(
                answer.thread, answer.seq, answer.value, answer.is_error
            )
            taken.append((answer, is_accepted))
            if active is not None and is_accepted:
                touched[answer.execution] = active
        for id_ in runnable:
            if id_ not in touched and (active := self._machines.get(id_)) is not None:
                touched[id_] = active
        cleared: list[str] = []
        for active in touched.values():
            active.machine.run()
            cleared += self._callbacks.take_early_requests(active.machine)
        self._effects.dispatch(self._commit(touched, taken, cleared))
        for answer, is_accepted in taken:
            answer.settle(is_accepted)

    def _commit(
        self, touched: Mapping[int, ActiveExecution], taken: Sequence[tuple[Answer, bool]], cleared: Sequence[str]
    ) -> list[tuple[int, Wait]]:
        """Write a round; returns the new waits."""
        waits: list[tuple[int, Wait]] = []
        if not touched:
            return waits
        ended: list[str] = []
        with self._core.owned_transaction():
            for answer, is_accepted in taken:
                if is_accepted and not touched[answer.execution].waits_again(answer.thread):
                    self._core.store.drop_wait(*answer.key)
            for ref in cleared:
                self._core.store.fill_callback(ref, None)
            for id_, active in touched.items():
                if active.machine.outcome is None:
                    waits += [(id_, wait) for wait in self._save(id_, active)]
                else:
                    self._executions.finish(id_, active)
                    ended.append(active.name)
            if ended:
                self._executions.promote(len(ended))
        for id_, active in touched.items():
            self._after_save(id_, active)
        for name in ended:
            self._executions.notify(name)
        return waits

    def _save(self, id_: int, active: ActiveExecution) -> Sequence[Wait]:
        machine = active.machine
        for ref, method in machine.new_callbacks:
            self._core.store.put_callback(ref, id_, method)
        for wait in machine.waits:
            if wait.kind == "execution" and self._effects.performer.mocks is None:
                self._executions.children.start(id_, wait, self._create)
            self._core.store.put_wait(id_, wait)
        snapshot, added, removed = machine.snapshot()
        self._core.store.save_state(id_, snapshot, added, removed, runnable=machine.is_ready)
        self._executions.save_history(id_, active)
        return machine.waits

    def _after_save(self, id_: int, active: ActiveExecution) -> None:
        machine = active.machine
        for entry in machine.logs:
            logs.write_entry(active.name, entry)
        active.next_chunk += bool(machine.events)
        machine.events, machine.logs, machine.new_callbacks, machine.waits = [], [], [], []
        if machine.outcome is not None:
            self._effects.forget(id_)
            self._executions.after_finish(id_)
        elif machine.is_ready:
            self._core.inbox.make_runnable(id_)
