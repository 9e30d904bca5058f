"""Long-running operations: steps, failures, restarts, waits, pages and the ids of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from google.longrunning import operations_pb2
from google.protobuf import duration_pb2
from tests.patience import PATIENCE_SECONDS

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError
from dropforge_local.emulators.kit.operations import EMPTY, Operation, Operations, longrunning, pack, unpack

PARENT = "projects/p1/locations/us-central1"
THING = f"{PARENT}/things/t1"


def with_operations(work: Callable[[Operations], Awaitable[None]], path: Path | str = ":memory:") -> None:
    async def run() -> None:
        db = Database(path)
        operations = Operations(db, SystemClock(), "Things")
        try:
            await work(operations)
        finally:
            await operations.stop()
            db.close()

    asyncio.run(run())


async def never(operation: Operation) -> None:
    await asyncio.Event().wait()


def test_a_step_finishes_its_operation() -> None:
    async def work(operations: Operations) -> None:
        async def step(operation: Operation) -> None:
            operations.finish(operation, EMPTY, {"state": "done"})

        operations.carry_out({"create": step})
        begun = operations.begin("o1", "create", THING, metadata={"state": "begun"})
        assert (begun.name, begun.is_done) == (f"{PARENT}/operations/o1", False)
        done = await operations.wait(begun.name, PATIENCE_SECONDS)
        assert (done.response, done.metadata, done.error) == (EMPTY, {"state": "done"}, None)
        operations.delete(begun.name)
        with pytest.raises(ApiError, match=r"Operation '.*/operations/o1' does not exist"):
            operations.get(begun.name)

    with_operations(work)


def test_a_refusal_fails_the_operation() -> None:
    async def work(operations: Operations) -> None:
        async def step(operation: Operation) -> None:
            raise ApiError("RESOURCE_EXHAUSTED", "no capacity")

        operations.carry_out({"create": step})
        done = await operations.wait(operations.begin("o1", "create", THING).name, PATIENCE_SECONDS)
        message = longrunning(done)
        assert (message.done, message.error.code, message.error.message) == (True, 8, "no capacity")

    with_operations(work)


def test_the_next_start_resumes_unfinished_operations(tmp_path: Path) -> None:
    async def begin(operations: Operations) -> None:
        operations.carry_out({"create": never})
        operations.begin("o1", "create", THING)
        operations.begin("o2", "run", THING, waits_for="run-1")
        assert [operation.name for operation in operations.unfinished(THING)] == [f"{PARENT}/operations/o1"]

    async def resume(operations: Operations) -> None:
        async def step(operation: Operation) -> None:
            operations.finish(operation, EMPTY)

        operations.carry_out({"create": step})
        operations.start()
        assert (await operations.wait(f"{PARENT}/operations/o1", 30)).is_done
        operations.finish_waiting("run-1", lambda operation: operations.finish(operation, EMPTY))
        assert operations.get(f"{PARENT}/operations/o2").is_done

    with_operations(begin, tmp_path / "state.db")
    with_operations(resume, tmp_path / "state.db")


def test_a_wait_ends_after_its_time_and_a_running_operation_is_not_deleted() -> None:
    async def work(operations: Operations) -> None:
        operations.carry_out({"create": never})
        name = operations.begin("o1", "create", THING).name
        assert not (await operations.wait(name, 0.01)).is_done
        with pytest.raises(ApiError, match="still running"):
            operations.delete(name)

    with_operations(work)


def test_pages_and_request_ids() -> None:
    async def work(operations: Operations) -> None:
        operations.carry_out({"create": never})
        names = [operations.begin(f"o{number}", "create", THING, request=f"r{number}").name for number in range(3)]
        first, token = operations.page("projects/p1/locations/-", 2)
        last, end = operations.page(PARENT, 2, token)
        assert [operation.name for operation in [*first, *last]] == names[::-1]
        assert (len(first), end) == (2, "")
        known = operations.of_request(PARENT, "r1")
        assert known is not None
        assert known.name == names[1]
        assert operations.of_request(PARENT, "") is None

    with_operations(work)


SECONDS = duration_pb2.Duration(seconds=90)


def test_an_operation_shows_the_messages_that_it_keeps() -> None:
    async def work(operations: Operations) -> None:
        operations.carry_out({"create": never})
        begun = operations.begin("o1", "create", THING, metadata=pack(SECONDS))
        shown = longrunning(begun)
        assert (shown.name, shown.done, shown.WhichOneof("result")) == (begun.name, False, None)
        assert unpack(begun.metadata, duration_pb2.Duration()) == SECONDS
        operations.finish(begun, pack(SECONDS))
        answered = operations_pb2.Operation.FromString(longrunning(operations.get(begun.name)).SerializeToString())
        for part in (answered.metadata, answered.response):
            told = duration_pb2.Duration()
            assert part.Unpack(told)
            assert told == SECONDS

    with_operations(work)
