"""Background work: a stop ends every task, a failure is logged, and a wait ends with the first event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest
from tests.patience import PATIENCE_SECONDS

from dropforge_local.emulators.kit.background import Background, Changes, first, stop_all


def test_stop_ends_every_task_also_tasks_that_start_meanwhile() -> None:
    async def run() -> list[str]:
        background, ended = Background("a test"), list[str]()

        async def work(name: str, successor: str = "") -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(name)
                if successor:
                    background.spawn(work(successor))

        background.spawn(work("first", "second"))
        await asyncio.sleep(0)
        await background.stop()
        late = background.spawn(work("late"))
        await asyncio.wait([late])
        assert late.cancelled()
        return ended

    assert asyncio.run(run()) == ["first"]


def test_a_failure_is_logged_unless_it_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def run() -> None:
        background = Background("a test", answers=(LookupError,))
        await asyncio.wait([background.spawn(fail(error)) for error in (ValueError("bad"), LookupError("none"))])

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    [record] = caplog.records
    assert record.getMessage() == "background work of a test failed; the next start resumes it"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "bad"


def test_changes_wake_every_waiter_once() -> None:
    async def run() -> tuple[bool, bool]:
        changes = Changes()
        early = changes.wait()
        changes.notify()
        await early
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(changes.wait(), 0.01)
        reached: list[str] = []
        asyncio.get_running_loop().call_soon(reached.append, "x")
        asyncio.get_running_loop().call_soon(changes.notify)
        await changes.until(lambda: bool(reached), PATIENCE_SECONDS)
        in_time = bool(reached)
        await changes.until(lambda: False, 0.01)
        return in_time, len(asyncio.all_tasks()) == 1

    assert asyncio.run(run()) == (True, True)


def test_first_cancels_the_other_waits() -> None:
    async def run() -> bool:
        never = asyncio.ensure_future(asyncio.Event().wait())
        await first(never, asyncio.sleep(0))
        return never.cancelled()

    assert asyncio.run(run())


def test_stop_all_runs_every_stop_and_raises_the_error() -> None:
    stopped = []

    def stop(name: str, error: Exception | None = None) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            stopped.append(name)
            if error:
                raise error

        return run

    with pytest.raises(OSError, match="stuck"):
        asyncio.run(stop_all(stop("a"), stop("b", OSError("stuck")), stop("c")))
    assert stopped == ["a", "b", "c"]
