"""Runs a single execution in memory to its end, for tests of workflows and for command lines.

Under the virtual clock no wait takes real time: whenever the engine is idle, time jumps to the next timer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from .clock import Clock, VirtualClock
from .database import SqliteDatabase
from .effects.mocks import Mocks
from .engine.engine import Engine
from .interpreter.history import Entry, read_entries
from .limits import Limits
from .records import ExecutionRecord

WORKFLOW: Final = "projects/local-project/locations/us-central1/workflows/workflow"


@dataclass(frozen=True)
class Simulation:
    """How an execution ended, and its step entries."""

    record: ExecutionRecord
    entries: list[Entry] = field(repr=False)  # entries refer to each other, so their repr has no end

    @property
    def state(self) -> str:
        return self.record.state

    @property
    def result(self) -> Any:
        return json.loads(self.record.result) if self.record.result is not None else None

    @property
    def error(self) -> Any:
        """The error's value, as `except` binds it; None if the execution did not fail."""
        return json.loads(self.record.error["payload"]) if self.record.error else None


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
    """Deploy `source`, run an execution, and return how it ended. The default clock is virtual.

    `cancel_after` cancels the execution that many seconds after its start. Raises DeployError for a source with
    mistakes, InvalidArgument for a bad environment.
    """
    return asyncio.run(
        _simulate(source, argument, mocks, env or {}, clock or VirtualClock(), limits or Limits(), name, cancel_after)
    )


class Until(Protocol):
    """The part of a future that `drive` reads."""

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
    db = SqliteDatabase()
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
        db.close()


async def _cancel(engine: Engine, clock: Clock, name: str, when: float) -> None:
    await clock.sleep_until(when)
    if not engine.get(name).is_finished:
        engine.cancel(name)


async def drive(engine: Engine, clock: VirtualClock, until: Until) -> None:
    """Advance a virtual clock to the next timer whenever the engine is idle, until `until` is done."""
    while not until.done():
        for _ in range(4):  # lets new tasks run up to their first wait
            await asyncio.sleep(0)
        if until.done():
            return
        if not engine.is_idle:
            await asyncio.sleep(0 if engine.is_computing else 0.0005)
        elif (wake := clock.next_wake()) is not None:
            clock.advance(wake)
        else:
            await asyncio.sleep(0.0005)
