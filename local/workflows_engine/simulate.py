"""Run one workflow in memory to its end: for tests of workflows, and for `dropforge workflows run`.

With the virtual clock nothing waits: whenever the engine has nothing to do, time jumps to the next timer.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from .clock import Clock, SystemClock, VirtualClock
from .engine import Engine
from .history import Entry, read_entries
from .limits import Limits
from .mock import Mocks
from .store import ExecutionRecord

WORKFLOW = "projects/local-project/locations/us-central1/workflows/workflow"


@dataclass(frozen=True)
class Simulation:
    """How an execution ended, and its step entries."""

    record: ExecutionRecord
    entries: list[Entry] = field(repr=False)  # linked to one another: a repr that never ends

    @property
    def state(self) -> str:
        return self.record.state

    @property
    def result(self) -> Any:
        return json.loads(self.record.result) if self.record.result is not None else None

    @property
    def error(self) -> Any:
        """The error's value, as `except` would bind it; None if there is none."""
        return json.loads(self.record.error["payload"]) if self.record.error else None


class MemoryDatabase:
    """A database that ends with the process: what Engine asks of one, and no more."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        self._depth = 0
        self._after: list[Callable[[], None]] = []

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        if self._depth:
            yield self.connection
            return
        self.connection.execute("BEGIN")
        self._depth = 1
        try:
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException:
            self._after.clear()
            self.connection.execute("ROLLBACK")
            raise
        finally:
            self._depth = 0
        after, self._after = self._after, []
        for callback in after:
            callback()

    def after_commit(self, callback: Callable[[], None]) -> None:
        if self._depth:
            self._after.append(callback)
        else:
            callback()

    async def durable(self, *, alone: bool = False) -> None:
        """Nothing here outlives the process."""


def simulate(
    source: str,
    argument: Any = None,
    *,
    mocks: Mocks | None = None,
    env: Mapping[str, str] | None = None,
    clock: Clock | None = None,
    limits: Limits | None = None,
    name: str = WORKFLOW,
    cancel_after: float | None = None,
) -> Simulation:
    """Deploy `source`, run it once, and wait for its end; under a virtual clock unless another is given.

    `cancel_after` cancels the execution so many seconds after its start. Raises DeployError for a source with mistakes.
    """
    return asyncio.run(
        _simulate(source, argument, mocks, env or {}, clock or VirtualClock(), limits or Limits(), name, cancel_after)
    )


class Until(Protocol):
    """A future, as far as `drive` looks at it."""

    def done(self) -> bool: ...


async def _simulate(
    source: str,
    argument: Any,
    mocks: Mocks | None,
    env: Mapping[str, str],
    clock: Clock,
    limits: Limits,
    name: str,
    cancel_after: float | None,
) -> Simulation:
    db = MemoryDatabase()
    engine = Engine(db, clock=clock, mocks=mocks, limits=limits, callback_base_url="http://127.0.0.1:0")
    await engine.start()
    cancelling: asyncio.Task[None] | None = None
    try:
        engine.deploy(name, source, env=env)
        record = engine.create_execution(name, json.dumps(argument))
        if cancel_after is not None:
            cancelling = asyncio.create_task(_cancel(engine, clock, record.name, clock.now() + cancel_after))
        done = asyncio.create_task(engine.wait(record.name))
        if isinstance(clock, VirtualClock):
            await drive(engine, clock, done)
        record = await done
        _, events, program = engine.history(record.name)
        return Simulation(record, read_entries(events, program, record.state))
    finally:
        if cancelling is not None:
            cancelling.cancel()
        await engine.stop()
        db.connection.close()


async def _cancel(engine: Engine, clock: Clock, name: str, when: float) -> None:
    await clock.sleep_until(when)
    if not engine.get(name).is_finished:
        engine.cancel(name)


async def drive(engine: Engine, clock: VirtualClock, until: Until) -> None:
    """Move a virtual clock to the next timer whenever the engine has nothing else to do, until `until` is done."""
    while not until.done():
        for _ in range(4):  # let tasks that have just been started reach what they wait for
            await asyncio.sleep(0)
        if until.done():
            return
        if not engine.is_idle:
            await asyncio.sleep(0 if engine.is_computing else 0.0005)
        elif (wake := clock.next_wake()) is not None:
            clock.advance(wake)
        else:
            await asyncio.sleep(0.0005)


__all__ = ["Simulation", "SystemClock", "drive", "simulate"]
