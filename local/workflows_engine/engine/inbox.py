"""The work of the next round: answers that arrived, and executions that can continue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ..values import Value

log = logging.getLogger(__name__)

WaitKey: TypeAlias = tuple[int, int, int]  # execution, thread, seq


@dataclass
class Answer:
    """The answer to a wait. After the commit, `settled` receives whether the thread still waited for the answer."""

    execution: int
    thread: int
    seq: int
    value: Value
    is_error: bool = False
    settled: asyncio.Future[bool] | None = None

    @property
    def key(self) -> WaitKey:
        return self.execution, self.thread, self.seq

    def settle(self, accepted: bool) -> None:
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(accepted)


class Inbox:
    """Collects answers and runnable executions, and calls `run_round` soon after the first of them."""

    def __init__(self) -> None:
        self.lost_lease = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.run_round: Callable[[], None] = lambda: None
        self._answers: list[Answer] = []
        self._runnable: dict[int, None] = {}
        self._handle: asyncio.Handle | None = None

    def stop(self) -> None:
        """Drop everything: the database holds what the next start needs."""
        self.loop = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._answers.clear()
        self._runnable.clear()

    @property
    def has_work(self) -> bool:
        return bool(self._answers or self._runnable or self._handle)

    def pending(self) -> set[WaitKey]:
        """The waits that already have an answer for the next round."""
        return {answer.key for answer in self._answers}

    def put(self, answer: Answer) -> None:
        self._answers.append(answer)
        self.wake()

    def make_runnable(self, id_: int) -> None:
        self._runnable[id_] = None
        self.wake()

    def forget(self, id_: int) -> None:
        self._runnable.pop(id_, None)

    def wake(self) -> None:
        if self.loop is not None and self._handle is None and not self.lost_lease:
            self._handle = self.loop.call_soon(self.run_round)

    def run_now(self) -> None:
        """Run the scheduled round at once."""
        if self._handle is not None:
            self._handle.cancel()
            self.run_round()

    def take(self) -> tuple[list[Answer], dict[int, None]]:
        """The work of this round."""
        self._handle = None
        answers, self._answers = self._answers, []
        runnable, self._runnable = self._runnable, {}
        return answers, runnable

    def put_back(self, answers: list[Answer], runnable: dict[int, None], delay: float) -> None:
        """Do the work of a failed round again after `delay` seconds."""
        self._answers[:0] = answers
        self._runnable.update(runnable)
        if self.loop is not None:
            self.loop.call_later(delay, self.wake)

    def wake_if_work(self) -> None:
        if self._answers or self._runnable:
            self.wake()

    def lose_lease(self) -> None:
        """Stop advancing executions: another engine owns the database."""
        log.error("another engine has taken over this database; this engine stops")
        self.lost_lease = True
