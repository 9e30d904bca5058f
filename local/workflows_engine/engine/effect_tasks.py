"""Starts the effects of committed waits, and brings their answers to the inbox."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from ..effects import logs
from ..effects.connectors import Later
from ..effects.performer import UNANSWERED, Performer
from ..errors import LeaseLost, WorkflowError, system_error
from ..interpreter.answers import error_value
from ..interpreter.waits import Wait
from .core import Core
from .inbox import Answer, WaitKey
from .machines import Machines
from .timer import Timer

log = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 0.05  # after a read was sent, until the commits before it are on the disk


class EffectTasks:
    """One asyncio task for each effect in flight."""

    def __init__(self, core: Core, timer: Timer, machines: Machines, performer: Performer) -> None:
        self.performer = performer
        self._core = core
        self._timer = timer
        self._machines = machines
        self._tasks: dict[WaitKey, asyncio.Task[None]] = {}
        # By execution: the threads that told the outside something, and whose answer may not be on the disk yet.
        self._told: dict[int, set[int]] = {}
        self._flush: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """True if every effect in flight sleeps on the clock."""
        return len(self._tasks) == self.performer.dozing

    def stop(self) -> list[asyncio.Task[None]]:
        """Cancel every effect; returns the cancelled tasks."""
        tasks = [*self._tasks.values(), *([self._flush] if self._flush else [])]
        self._tasks.clear()
        self._told.clear()
        self._flush = None
        for task in tasks:
            task.cancel()
        return tasks

    def cancel(self, id_: int) -> None:
        """Cancel the effects of an execution that has ended."""
        self.forget(id_)
        for key in [key for key in self._tasks if key[0] == id_]:
            self._tasks.pop(key).cancel()

    def forget(self, id_: int) -> None:
        """Drop what is known about an execution that has ended."""
        self._told.pop(id_, None)

    def dispatch(self, waits: Sequence[tuple[int, Wait]]) -> None:
        """Start the effects and timers of committed waits. Requests that must not be sent twice are marked first."""
        unsafe = [(id_, wait.thread) for id_, wait in waits if not self.performer.may_repeat(wait)]
        if unsafe:
            with self._core.owned_transaction():
                self._core.store.mark_sent(unsafe)
        earliest = float("inf")
        for id_, wait in waits:
            if wait.due is not None:
                earliest = min(earliest, wait.due)
            if self.performer.is_performed(wait):
                self._start(id_, wait)
        self._timer.schedule(earliest)

    def recover(self) -> None:
        """Repeat the effects that were in flight when the engine ended, if that is safe; else answer with an error."""
        for id_, wait, sent in self._core.store.pending_effects():
            if not sent or self.performer.may_repeat(wait):
                self._start(id_, wait)
                continue
            call = wait.call if wait.kind == "connector" else f"{wait.detail['method']} {wait.detail['url']}"
            message = f"the engine stopped during {call}; the service may have received the request"
            error = error_value(system_error("ConnectionError", message))
            self._core.inbox.put(Answer(id_, wait.thread, wait.seq, error, True))

    def _start(self, id_: int, wait: Wait) -> None:
        assert self._core.inbox.loop is not None
        key = (id_, wait.thread, wait.seq)
        self._tasks[key] = self._core.inbox.loop.create_task(self._run(key, wait))

    async def _run(self, key: WaitKey, wait: Wait) -> None:
        answer = await self._answer(key, wait)
        self._tasks.pop(key, None)
        if answer is None:
            return
        if isinstance(answer, Later):
            self._postpone(key[0], answer.wait)
            return
        self._core.inbox.put(answer)
        if not self._tasks:
            self._core.inbox.run_now()  # no other answer can arrive in this round, so there is no group to wait for

    async def _answer(self, key: WaitKey, wait: Wait) -> Answer | Later | None:
        id_, thread, seq = key
        try:
            await self._secure(id_, wait)
            active = self._machines.in_memory(id_)
            name = active.name if active is not None else self._core.store.execution_name(id_)
            execution = name.rsplit("/", 1)[-1]  # its UUID: row ids repeat in another database
            value = await self.performer.perform(wait, f"{execution}-{thread}-{seq}")
        except WorkflowError as error:
            self._log_call(id_, wait, error)
            return Answer(id_, thread, seq, error_value(error), True)
        except Exception as error:  # a defect in an effect must not leave its execution waiting forever
            log.exception("%s", wait.call)
            failure = system_error("SystemError", f"{type(error).__name__}: {error}")
            return Answer(id_, thread, seq, error_value(failure), True)
        if value is UNANSWERED:
            return None
        if isinstance(value, Later):
            return value
        self._log_call(id_, wait, None)
        return Answer(id_, thread, seq, value)

    async def _secure(self, id_: int, wait: Wait) -> None:
        """Return when the commits before an effect are on the disk, or at once if the effect is a read after a read.

        Consecutive reads share an fsync, which follows them: a power cut in between costs the reads, which are sent
        again. The answer to anything else is on the disk before the next effect. Its thread counts until then, and
        until its execution's end if it has no next effect: another thread cannot tell whether the answer is committed.
        """
        is_read = self.performer.is_read(wait)
        if is_read and not self._told.get(id_):
            if self._flush is None or self._flush.done():
                self._flush = asyncio.create_task(self._flush_soon())
            return
        await self._core.db.durable(alone=len(self._tasks) == 1)
        self._told.get(id_, set()).discard(wait.thread)
        if not is_read:
            self._told.setdefault(id_, set()).add(wait.thread)

    async def _flush_soon(self) -> None:
        await asyncio.sleep(FLUSH_SECONDS)
        try:
            await self._core.db.durable()
        except OSError:
            log.exception("commits are not on the disk yet; the next effect that is no read waits for them")

    def _postpone(self, id_: int, wait: Wait) -> None:
        """Record the phase of a connector's call, and when the next phase is due."""
        try:
            with self._core.owned_transaction():
                record = self._core.store.execution_by_id(id_)
                if record is None or record.state != "ACTIVE":
                    return
                self._core.store.put_wait(id_, wait)
        except LeaseLost:
            self._core.inbox.lose_lease()
            return
        assert wait.due is not None
        self._timer.schedule(wait.due)

    def _log_call(self, id_: int, wait: Wait, error: WorkflowError | None) -> None:
        active = self._machines.in_memory(id_)
        level = active.settings.get("call_log_level") if active else ""
        if active and (level == "LOG_ALL_CALLS" or (level == "LOG_ERRORS_ONLY" and error is not None)):
            logs.write_call(active.name, wait, error)
