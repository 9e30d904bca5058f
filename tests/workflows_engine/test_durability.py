"""A kill at any commit leaves the result and the effects as they are without a kill."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from workflows_engine import (
    Engine,
    ExecutionRecord,
    FailedPrecondition,
    HttpRequest,
    HttpResponse,
    Limits,
    NotFound,
    ResourceExhausted,
    SqliteDatabase,
    VirtualClock,
    drive,
)
from workflows_engine.lease import Lease

from .conftest import duration

FLOW = "projects/p/locations/l/workflows/flow"
CHILD = "projects/p/locations/l/workflows/child"

STRAIGHT = """
main:
  params: [args]
  steps:
    - init: {assign: [{seen: []}, {big: "${args.big}"}]}
    - one: {call: http.get, args: {url: "http://peer/one"}, result: r}
    - keep: {assign: [{seen: "${list.concat(seen, r.body)}"}]}
    - nap: {call: sys.sleep, args: {seconds: 3600}}
    - two:
        call: http.post
        args: {url: "http://peer/two", headers: {Idempotency-Key: two}, body: {big: "${len(big)}"}}
        result: r
    - loop:
        for:
          value: i
          range: [1, 3]
          steps:
            - get: {call: step, args: {n: "${i}"}, result: r}
            - add: {assign: [{seen: "${list.concat(seen, r)}"}]}
    - done: {return: "${seen}"}
step:
  params: [n]
  steps:
    - get: {call: http.put, args: {url: "${\\"http://peer/step\\" + n}"}, result: r}
    - back: {return: "${r.body}"}
"""

PARALLEL = """
main:
  steps:
    - init: {assign: [{sums: {}}]}
    - p:
        parallel:
          shared: [sums]
          concurrency_limit: 2
          for:
            value: v
            in: [1, 2, 3]
            steps:
              - get: {call: http.get, args: {url: "${\\"http://peer/p\\" + v}"}, result: r}
              - nap: {call: sys.sleep, args: {seconds: "${v}"}}
              - keep: {assign: [{'sums["k" + v]': "${r.body}"}]}
    - failing:
        try:
          parallel:
            branches:
              - a: {steps: [{g: {call: http.get, args: {url: "http://peer/a"}}}]}
              - b: {steps: [{g: {call: http.get, args: {url: "http://peer/bad"}}}]}
        except:
          as: e
          steps:
            - keep: {assign: [{sums.error: "${e.branches[0].id}"}]}
    - done: {return: "${sums}"}
"""

RETRIED = """
main:
  steps:
    - t:
        try:
          steps:
            - get: {call: http.get, args: {url: "http://peer/flaky"}, result: r}
        retry:
          predicate: ${again}
          max_retries: 5
          backoff: {initial_delay: 1, max_delay: 8, multiplier: 2}
        except:
          as: e
          steps:
            - lost: {return: "${e}"}
    - c: {call: events.create_callback_endpoint, result: c}
    - w:
        try: {call: events.await_callback, args: {callback: "${c}", timeout: 60}}
        except:
          as: e
          steps:
            - done: {return: ["${r.body}", "${e.tags[0]}"]}
again:
  params: [e]
  steps:
    - look: {call: http.get, args: {url: "http://peer/look"}}
    - r: {return: "${e.code == 503}"}
"""


class Killed(BaseException):
    """The process is dead: it must do nothing after this."""


class FragileDatabase(SqliteDatabase):
    """Kills the engine before or after the commit with a given number."""

    def __init__(self, path: Path, kill_at: int | None, after: bool) -> None:
        super().__init__(path)
        self.commits = 0
        self._kill_at = kill_at
        self._after = after
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        if self._depth:
            yield self.connection
            return
        if self.dead.done():
            raise Killed
        dying = self.commits + 1 == self._kill_at
        callbacks: list[Callable[[], None]] = []
        with super().transaction() as connection:
            yield connection
            if dying and not self._after:
                self.dead.set_result(None)
                raise Killed
            callbacks, self._after_commit = self._after_commit, []
        self.commits += 1
        if dying:
            self.dead.set_result(None)
            raise Killed
        for callback in callbacks:
            callback()


class Services:
    """The services of the workflows, which outlive every engine. A request takes a moment, so a kill can hit it."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, str]] = Counter()
        self.effects: dict[str, set[str]] = {}
        self.database: FragileDatabase | None = None
        self._answers: dict[str, HttpResponse] = {}

    async def send(self, request: HttpRequest) -> HttpResponse:
        path = request.url.removeprefix("http://peer/")
        key = request.headers["Idempotency-Key"]
        self.sent[(path, key)] += 1
        self.effects.setdefault(path, set()).add(key)
        await asyncio.sleep(0)
        return self._answers.setdefault(key, self._answer(path))

    def _answer(self, path: str) -> HttpResponse:
        tries = len(self.effects[path])
        status = 404 if path == "bad" else 503 if path == "flaky" and tries < 3 else 200
        return HttpResponse(status, {"Content-Type": "application/json"}, json.dumps(f"{path}-{tries}").encode())

    async def close(self) -> None: ...

    def distinct(self) -> dict[str, int]:
        """The number of effects at each path; repeated requests of the same effect count once."""
        return {path: len(keys) for path, keys in self.effects.items()}


class Either:
    """Is done when any of its futures is."""

    def __init__(self, *futures: asyncio.Future[Any]) -> None:
        self._futures = futures

    def done(self) -> bool:
        return any(future.done() for future in self._futures)


async def run_until_dead_or_done(path: Path, services: Services, kill_at: int | None, after: bool, source: str) -> Any:
    """A life of an engine on the database. Returns the finished record, or None if the engine was killed."""
    db = FragileDatabase(path, kill_at, after)
    clock = VirtualClock()
    clock.advance(float((path.parent / "clock").read_text()) if (path.parent / "clock").exists() else 0)
    engine: Engine | None = None
    waiting: asyncio.Task[Any] | None = None
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: None)  # callbacks of a killed engine raise Killed
    try:
        engine = Engine(db, clock=clock, http=services, limits=Limits())
        await engine.start()
        names = [record.name for record in engine.list(FLOW)]
        if not names:
            engine.deploy(FLOW, source)
            names = [engine.create_execution(FLOW, json.dumps({"big": ["x" * 100] * 100})).name]
        waiting = asyncio.create_task(engine.wait(names[0]))
        await drive(engine, clock, Either(waiting, db.dead))
        return None if db.dead.done() else waiting.result()
    except Killed:
        return None
    finally:
        (path.parent / "clock").write_text(str(clock.now()))
        if waiting is not None:
            waiting.cancel()
        if engine is not None:
            abandon(engine)
        await asyncio.sleep(0)
        db.connection.close()


def abandon(engine: Engine) -> None:
    """Do to an engine what SIGKILL does: its tasks stop, and it writes nothing."""
    engine.halt()


def without_kill(tmp_path: Path, source: str) -> tuple[str, str, dict[str, int], int]:
    (tmp_path / "whole").mkdir()
    services = Services()

    async def run() -> tuple[Any, int]:
        db_path = tmp_path / "whole" / "x.db"
        record = await run_until_dead_or_done(db_path, services, None, False, source)
        db = SqliteDatabase(db_path)
        chunks = db.connection.execute("SELECT count(*) FROM wf_history").fetchone()[0]
        db.close()
        return record, chunks

    record, commits = asyncio.run(run())
    assert max(services.sent.values()) == 1
    return record.state, record.result, services.distinct(), commits


@pytest.mark.parametrize("after", [False, True], ids=["before-commit", "after-commit"])
@pytest.mark.parametrize("source", [STRAIGHT, PARALLEL, RETRIED], ids=["straight", "parallel", "retried"])
def test_killed_at_every_commit(tmp_path: Path, source: str, after: bool) -> None:
    expected = without_kill(tmp_path, source)
    assert expected[0] == "SUCCEEDED"
    killed = 0
    for kill_at in range(1, 200):
        home = tmp_path / f"kill-{kill_at}"
        home.mkdir()
        services = Services()

        async def lives(home: Path = home, services: Services = services, kill_at: int = kill_at) -> tuple[Any, bool]:
            first = await run_until_dead_or_done(home / "x.db", services, kill_at, after, source)
            if first is not None:
                return first, False
            return await run_until_dead_or_done(home / "x.db", services, None, after, source), True

        record, was_killed = asyncio.run(lives())
        assert (record.state, record.result) == expected[:2], f"killed at commit {kill_at}: {record.error}"
        assert services.distinct() == expected[2], f"killed at commit {kill_at}"
        if not was_killed:
            break
        killed += 1
    assert killed > 10


def test_killed_at_every_commit_of_every_life(tmp_path: Path) -> None:
    expected = without_kill(tmp_path, STRAIGHT)
    services = Services()

    async def lives() -> tuple[Any, int]:
        for life in range(200):  # schema and lease are commits, too, so each life advances a little
            record = await run_until_dead_or_done(tmp_path / "x.db", services, 6, life % 2 == 0, STRAIGHT)
            if record is not None:
                return record, life
        raise AssertionError("the lives make no progress")

    record, life = asyncio.run(lives())
    assert life >= 3
    assert (record.state, record.result, services.distinct()) == expected[:3]


UNKEYED = """
main:
  steps:
    - t:
        try: {call: http.post, args: {url: "http://peer/pay", body: 1}, result: r}
        except: {as: e, steps: [{r: {return: "${e.tags[0]}"}}]}
    - done: {return: "${r.body}"}
"""


@pytest.mark.parametrize("after", [False, True])
def test_a_post_without_a_key_is_never_sent_twice(tmp_path: Path, after: bool) -> None:
    results = set()
    for kill_at in range(1, 20):
        home = tmp_path / str(kill_at)
        home.mkdir()
        services = Services()

        async def lives(home: Path = home, services: Services = services, kill_at: int = kill_at) -> Any:
            first = await run_until_dead_or_done(home / "x.db", services, kill_at, after, UNKEYED)
            return first or await run_until_dead_or_done(home / "x.db", services, None, after, UNKEYED)

        record = asyncio.run(lives())
        assert sum(services.sent.values()) <= 1
        results.add(record.result)
    assert results == {'"pay-1"', '"ConnectionError"'}


def test_no_two_executions_send_the_same_idempotency_key(tmp_path: Path) -> None:
    """Also not in two databases: a peer that honours keys would answer the second execution from the first."""
    services = Services()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        asyncio.run(run_until_dead_or_done(tmp_path / name / "x.db", services, None, False, PARALLEL))
    assert set(services.sent.values()) == {1}


def test_two_engines_cannot_both_advance_an_execution(tmp_path: Path) -> None:
    async def run() -> None:
        services = Services()
        first = Engine(SqliteDatabase(tmp_path / "x.db"), clock=VirtualClock(), http=services)
        await first.start()
        first.deploy(FLOW, STRAIGHT)
        name = first.create_execution(FLOW, '{"big": []}').name
        clock = VirtualClock()
        second = Engine(SqliteDatabase(tmp_path / "x.db"), clock=clock, http=services)
        await second.start()
        done = asyncio.create_task(second.wait(name))
        await drive(second, clock, done)
        assert first.lost_lease
        assert done.result().state == "SUCCEEDED"
        assert max(services.sent.values()) == 1
        await first.stop()
        await second.stop()

    asyncio.run(run())


def test_a_killed_engine_loses_its_lease_before_its_parent_waits_for_it(tmp_path: Path) -> None:
    """Until the parent waits for the killed process, the kernel lists the process as a zombie."""
    database = str(tmp_path / "x.db")
    owner = (
        "import sys, time; from workflows_engine import SqliteDatabase; from workflows_engine.lease import Lease; "
        "Lease(SqliteDatabase(sys.argv[1])).acquire(takeover=False); print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", owner, database], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(FailedPrecondition, match="already runs"):
            Lease(SqliteDatabase(database)).acquire(takeover=False)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        Lease(SqliteDatabase(database)).acquire(takeover=False)


def test_a_callback_url_survives_a_restart(tmp_path: Path) -> None:
    source = """
main:
  steps:
    - c: {call: events.create_callback_endpoint, result: c}
    - told: {call: http.put, args: {url: "http://peer/told", body: "${c.url}"}}
    - w: {call: events.await_callback, args: {callback: "${c}"}, result: r}
    - done: {return: "${r.http_request.body}"}
"""

    async def run() -> None:
        services = Services()
        clock = VirtualClock()
        engine = Engine(SqliteDatabase(tmp_path / "x.db"), clock=clock, http=services, callback_base_url="http://here")
        await engine.start()
        engine.deploy(FLOW, source)
        name = engine.create_execution(FLOW).name
        while not engine.list_callbacks(name) or not engine.list_callbacks(name)[0][2]:
            await asyncio.sleep(0.001)
        abandon(engine)
        again = Engine(SqliteDatabase(tmp_path / "x.db"), clock=clock, http=services, callback_base_url="http://here")
        await again.start()
        ref = again.list_callbacks(name)[0][0]
        headers = {"Authorization": "Bearer t"}
        assert await again.deliver_callback(name, ref, "POST", headers, {}, {"n": 1}, "/x") == 200
        assert (await again.wait(name)).result == '{"n":1}'
        await again.stop()

    asyncio.run(run())


def test_a_backlog_forms_when_too_many_are_active(tmp_path: Path) -> None:
    source = "- nap: {call: sys.sleep, args: {seconds: 10}}\n"

    async def run() -> None:
        clock = VirtualClock()
        engine = Engine(
            SqliteDatabase(tmp_path / "x.db"), clock=clock, limits=Limits(active_executions=2, queued_executions=2)
        )
        await engine.start()
        engine.deploy(FLOW, source)
        records = [engine.create_execution(FLOW) for _ in range(4)]
        assert [record.state for record in records] == ["ACTIVE", "ACTIVE", "QUEUED", "QUEUED"]
        with pytest.raises(ResourceExhausted, match="backlog is full"):
            engine.create_execution(FLOW)
        with pytest.raises(ResourceExhausted, match="2 executions are active"):
            engine.create_execution(FLOW, disable_overflow_buffering=True)
        engine.cancel(records[3].name)
        ends = []
        for record in records[:3]:
            done = asyncio.create_task(engine.wait(record.name))
            await drive(engine, clock, done)
            ends.append(round(duration(done.result())))
        assert ends == [10, 10, 20]
        await engine.stop()

    asyncio.run(run())


def test_an_execution_cannot_run_longer_than_a_year(tmp_path: Path) -> None:
    source = "- again:\n    call: sys.sleep\n    args: {seconds: 2592000}\n    next: again\n"

    async def run() -> None:
        clock = VirtualClock()
        engine = Engine(SqliteDatabase(tmp_path / "x.db"), clock=clock)
        await engine.start()
        engine.deploy(FLOW, source)
        record = engine.create_execution(FLOW)
        done = asyncio.create_task(engine.wait(record.name))
        await drive(engine, clock, done)
        assert done.result().state == "FAILED"
        assert round(duration(done.result()) / 86400) == 365
        await engine.stop()

    asyncio.run(run())


def test_children_of_a_cancelled_parent_run_to_their_end(tmp_path: Path) -> None:
    parent = "- a: {call: experimental.executions.run, args: {workflow_id: child}}\n"
    child = "- nap: {call: sys.sleep, args: {seconds: 60}}\n- done: {return: 7}\n"

    async def run() -> None:
        clock = VirtualClock()
        engine = Engine(SqliteDatabase(tmp_path / "x.db"), clock=clock)
        await engine.start()
        engine.deploy(FLOW, parent)
        engine.deploy(CHILD, child)
        name = engine.create_execution(FLOW).name
        await drive(engine, clock, asyncio.create_task(clock.sleep_until(clock.now() + 1)))
        assert engine.cancel(name).state == "CANCELLED"
        (record,) = engine.list(CHILD)
        done = asyncio.create_task(engine.wait(record.name))
        await drive(engine, clock, done)
        assert (done.result().state, done.result().result) == ("SUCCEEDED", "7")
        await engine.stop()

    asyncio.run(run())


@pytest.mark.parametrize("deleted", [False, True])
def test_a_parent_learns_of_an_end_that_it_had_not_heard_of_before_a_kill(tmp_path: Path, deleted: bool) -> None:
    parent = """
- t:
    try: {call: experimental.executions.run, args: {workflow_id: child}}
    except: {as: e, steps: [{back: {return: "${e.tags[0]}"}}]}
"""

    async def run() -> None:
        clock = VirtualClock()
        engine = Engine(SqliteDatabase(tmp_path / "x.db"), clock=clock)
        await engine.start()
        engine.deploy(FLOW, parent)
        engine.deploy(CHILD, "- nap: {call: sys.sleep, args: {seconds: 60}}\n")
        name = engine.create_execution(FLOW).name
        await drive(engine, clock, asyncio.create_task(clock.sleep_until(clock.now() + 1)))
        (record,) = engine.list(CHILD)
        engine.delete_workflow(CHILD) if deleted else engine.cancel(record.name)
        abandon(engine)  # after the commit of the child's end, before that of the parent's next step
        engine = Engine(SqliteDatabase(tmp_path / "x.db"), clock=clock, takeover=True)
        await engine.start()
        done = asyncio.create_task(engine.wait(name))
        await drive(engine, clock, Either(done, asyncio.create_task(clock.sleep_until(clock.now() + 100))))
        assert done.done()
        assert done.result().result == '"OperationError"'
        await engine.stop()

    asyncio.run(run())


def test_deleting_a_workflow_deletes_its_executions(tmp_path: Path) -> None:
    """A parent that waits for a deleted execution learns that it was cancelled."""
    parent = """
- t:
    try: {call: experimental.executions.map, args: {workflow_id: child, arguments: [0, 600]}}
    except: {as: e, steps: [{back: {return: "${e.operation.state}"}}]}
"""
    child = """
main:
  params: [seconds]
  steps:
    - c: {call: events.create_callback_endpoint, result: c}
    - nap: {call: sys.sleep, args: {seconds: "${seconds}"}}
"""

    async def run() -> None:
        clock, name = VirtualClock(), CHILD
        db = SqliteDatabase(tmp_path / "x.db")
        engine = Engine(db, clock=clock, limits=Limits(active_executions=3))
        await engine.start()
        engine.deploy(FLOW, parent)
        engine.deploy(name, child)
        waiting = asyncio.create_task(engine.wait(engine.create_execution(FLOW).name))
        naps = asyncio.create_task(clock.sleep_until(clock.now() + 60))
        await drive(engine, clock, naps)
        queued = [engine.create_execution(name, "600") for _ in range(2)]
        assert [record.state for record in queued] == ["ACTIVE", "QUEUED"]
        names = [record.name for record in engine.list(name)]
        engine.delete_workflow(name)
        await drive(engine, clock, waiting)
        assert waiting.result().result == '"CANCELLED"'
        for execution in names:
            with pytest.raises(NotFound):
                engine.get(execution)
        assert engine.deploy(name, child).revision_id.startswith("000001-")
        assert list(engine.list(name)) == []
        assert len(names) == 4
        for table in ("wf_history", "wf_state", "wf_value", "wf_wait", "wf_callback"):
            assert db.connection.execute(f"SELECT count(*) FROM {table} WHERE execution > 1").fetchone() == (0,)
        await engine.stop()

    asyncio.run(run())


def test_subexecutions(tmp_path: Path) -> None:
    parent = """
main:
  steps:
    - one: {call: experimental.executions.run, args: {workflow_id: child, argument: {n: 1}}, result: a}
    - other:
        call: googleapis.workflowexecutions.v1.projects.locations.workflows.executions.run
        args: {workflow_id: child, location: l, project_id: p, argument: {n: 5}}
        result: d
    - many: {call: experimental.executions.map, args: {workflow_id: child, arguments: [{n: 2}, {n: 3}]}, result: b}
    - bad:
        try: {call: experimental.executions.run, args: {workflow_id: child, argument: {n: 0}}}
        except: {as: e, steps: [{k: {assign: [{c: "${e}"}]}}, {r: {return: ["${a}", "${b}", "${c.tags[0]}", "${d}"]}}]}
"""
    child = """
main:
  params: [args]
  steps:
    - nap: {call: sys.sleep, args: {seconds: "${args.n}"}}
    - r: {return: "${10 // args.n}"}
"""

    async def run() -> Any:
        clock = VirtualClock()
        engine = Engine(SqliteDatabase(tmp_path / "x.db"), clock=clock)
        await engine.start()
        engine.deploy(FLOW, parent)
        engine.deploy(CHILD, child)
        record = engine.create_execution(FLOW)
        done = asyncio.create_task(engine.wait(record.name))
        await drive(engine, clock, done)
        await engine.stop()
        return done.result()

    record = asyncio.run(run())
    assert json.loads(record.result) == [10, [5, 3], "OperationError", 2]


def test_a_value_nested_too_deeply_fails_only_its_execution(tmp_path: Path) -> None:
    """Python's JSON writer refuses the body; the other executions must not notice."""
    source = """
- a:
    try: {call: http.get, args: {url: "http://peer/deep"}}
    except: {as: e, steps: [{nap: {call: sys.sleep, args: {seconds: 1}}}]}
"""

    class Deep(Services):
        async def send(self, request: HttpRequest) -> HttpResponse:
            body = b"[" * 700 + b"]" * 700
            return HttpResponse(500, {"Content-Type": "application/json"}, body)

    async def run() -> None:
        clock = VirtualClock()
        engine = Engine(SqliteDatabase(tmp_path / "x.db"), clock=clock, http=Deep())
        await engine.start()
        engine.deploy(FLOW, source)
        engine.deploy(FLOW + "2", "- nap: {call: sys.sleep, args: {seconds: 5}}\n")
        records = [engine.create_execution(FLOW), engine.create_execution(FLOW + "2")]
        states = []
        for record in records:
            done = asyncio.create_task(engine.wait(record.name))
            await drive(engine, clock, done)
            states.append(done.result().state)
        print(done.result(), engine.get(records[0].name))
        assert states == ["FAILED", "SUCCEEDED"]
        deep = engine.create_execution(FLOW + "2", "[" * 800 + "]" * 800)
        assert (await engine.wait(deep.name)).state == "FAILED"
        await engine.stop()

    asyncio.run(run())


def test_finished_executions_are_deleted_after_ninety_days(tmp_path: Path) -> None:
    async def run() -> None:
        clock = VirtualClock()
        engine = Engine(SqliteDatabase(tmp_path / "x.db"), clock=clock)
        await engine.start()
        engine.deploy(FLOW, "- a: {return: 1}\n")
        old = engine.create_execution(FLOW)
        await engine.wait(old.name)
        await engine.stop()
        clock.advance(clock.now() + 91 * 86400)
        again = Engine(SqliteDatabase(tmp_path / "x.db"), clock=clock)
        await again.start()
        assert list(again.list(FLOW)) == []
        await again.stop()

    asyncio.run(run())


def ended(record: ExecutionRecord) -> float:
    assert record.ended is not None
    return record.ended
