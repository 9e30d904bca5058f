"""What the engine's tests share: sources that run in memory, and an engine beside an HTTP peer on real sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from workflows_engine import (
    Engine,
    ExecutionRecord,
    Limits,
    Machine,
    SqliteDatabase,
    SystemClock,
    Value,
    compile_source,
    parse_body,
)

PARENT = "projects/test-project/locations/europe-west4"
EXECUTION = f"{PARENT}/workflows/flow/executions/e-1"


def run_to_end(machine: Machine, answers: Iterable[Value] = ()) -> tuple[str, Any]:
    """Run a machine whose waits get `answers` in order, and null after them; returns its outcome."""
    pending = iter(answers)
    while machine.outcome is None:
        machine.run()
        waits, machine.waits = machine.waits, []
        for wait in waits:
            machine.complete(wait.thread, wait.seq, next(pending, None))
    return machine.outcome


def duration(record: ExecutionRecord) -> float:
    """Seconds from the creation of a finished execution to its end."""
    assert record.ended is not None
    return record.ended - record.created


class Failed(Exception):
    """An execution's error: `value` as `except` binds it, and the error as the API shows it."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["context"])
        self.error = error
        self.value = json.loads(error["payload"])


class Lab:
    """Runs workflow sources in memory."""

    def run(self, source: str, argument: Any = None, *, answers: Any = (), limits: Limits | None = None) -> Any:
        """The result of a source whose waits get `answers` in order, and null after them."""
        return self.machine(source, argument, answers=answers, limits=limits)[1]

    def machine(
        self, source: str, argument: Any = None, *, answers: Any = (), limits: Limits | None = None
    ) -> tuple[Machine, Any]:
        limits = limits or Limits()
        program, _ = compile_source(source, limits)
        machine = Machine(
            program,
            execution=EXECUTION,
            environment={"GOOGLE_CLOUD_PROJECT_ID": "test-project", "TEAM": "search"},
            callback_base_url="http://callbacks.test",
            limits=limits,
            now=lambda: 1_750_000_000.25,
        )
        machine.start(argument)
        state, value = run_to_end(machine, answers)
        if state == "FAILED":
            raise Failed(value)
        return machine, json.loads(value)

    def value(self, expression: str, **variables: Any) -> Any:
        """An expression's value, with `variables` in scope."""
        names = "".join(f"\n          - {name}: ${{args.{name}}}" for name in variables)
        assign = f"\n    - init:\n        assign:{names}" if variables else ""
        returned = json.dumps("${" + expression + "}")
        return self.run(
            f"main:\n  params: [args]\n  steps:{assign}\n    - done:\n        return: {returned}\n", variables
        )

    def error(self, expression: str, **variables: Any) -> dict[str, Any]:
        """The error map that an expression raises."""
        with pytest.raises(Failed) as caught:
            self.value(expression, **variables)
        value: dict[str, Any] = caught.value.value
        return value


@pytest.fixture
def lab() -> Lab:
    return Lab()


class Peer:
    """The services that workflows call: scripted answers by path, and every request."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answers: dict[str, Callable[[web.Request], web.StreamResponse]] = {}

    def received(self, path: str) -> list[tuple[str, str, dict[str, str], bytes]]:
        """(method, path and query, headers, body) of each request to a path."""
        return [request for request in self.requests if request[1].split("?")[0] == f"/peer/{path}"]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.method, request.path_qs, dict(request.headers), body))
        answer = self.answers.get(request.match_info["path"])
        if answer is not None:
            return answer(request)
        text = body.decode("utf-8", "replace")
        return web.json_response({"path": request.match_info["path"], "body": text, "query": dict(request.query)})


class Served:
    """An engine, its callbacks and its peer behind a real socket, on a thread of their own."""

    def __init__(self, path: Path) -> None:
        self.peer = Peer()
        self.engine: Engine
        self.url = ""
        self._path = path
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def start(self) -> None:
        self._thread.start()
        self._await(self._start())

    def stop(self) -> None:
        self._await(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def peer_url(self) -> str:
        return f"{self.url}/peer"

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's loop."""

        async def run() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return self._await(run())

    def deploy(self, name: str, source: str, **options: Any) -> str:
        workflow = f"{PARENT}/workflows/{name}"
        self.call(lambda: self.engine.deploy(workflow, source, **options))
        return workflow

    def run(self, source: str, argument: Any = None, name: str = "flow", **options: Any) -> Any:
        """The finished record of an execution."""
        workflow = self.deploy(name, source, **options)
        record = self.call(lambda: self.engine.create_execution(workflow, json.dumps(argument)))
        return self.call(lambda: self.engine.wait(record.name))

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(60)

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/peer/{path:.*}", self.peer.handle)
        app.router.add_route("*", "/v1/{execution:.*}/callbacks/{ref}", self._callback)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._db = SqliteDatabase(self._path)
        self.engine = Engine(
            self._db,
            clock=SystemClock(),
            callback_base_url=self.url,
            token=lambda kind, audience: f"{kind}:{audience}",
            authorize=lambda headers: "stranger" not in headers.get("Authorization", ""),
        )
        await self.engine.start()

    async def _stop(self) -> None:
        await self.engine.stop()
        await self._runner.cleanup()
        self._db.close()

    async def _callback(self, request: web.Request) -> web.Response:
        query = {name: request.query.getall(name) for name in request.query}
        status = await self.engine.deliver_callback(
            request.match_info["execution"],
            request.match_info["ref"],
            request.method,
            dict(request.headers),
            {name: values[0] if len(values) == 1 else values for name, values in query.items()},
            parse_body(await request.read(), request.headers.get("Content-Type", "")),
            request.path_qs,
        )
        return web.Response(status=status)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "engine.db")
    served.start()
    try:
        yield served
    finally:
        served.stop()
