"""What the engine's tests share: running a source without services, and a served engine beside a scripted HTTP peer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web

from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Server
from dropforge_local.emulators.workflows import WorkflowsEmulator
from workflows_engine.clock import SystemClock
from workflows_engine.compiler import compile_source
from workflows_engine.engine import Engine
from workflows_engine.limits import Limits
from workflows_engine.machine import Machine, run_to_end

PARENT = "projects/test-project/locations/europe-west4"
EXECUTION = f"{PARENT}/workflows/flow/executions/e-1"


class Failed(Exception):
    """An execution's error: `value` as `except` would bind it, and the error as the API shows it."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["context"])
        self.error = error
        self.value = json.loads(error["payload"])


class Lab:
    """Runs workflow sources in memory."""

    def run(self, source: str, argument: Any = None, *, answers: Any = (), limits: Limits | None = None) -> Any:
        """The result of a source whose waits get `answers` in order (null when they run out)."""
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
    """The services that workflows call: answers by path, and what was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answers: dict[str, Callable[[web.Request], web.StreamResponse]] = {}

    def routes(self) -> list[web.RouteDef]:
        return [web.route("*", "/peer/{path:.*}", self._answer)]

    def grpc_handlers(self) -> list[grpc.GenericRpcHandler]:
        return []

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def asked(self, path: str) -> list[tuple[str, str, dict[str, str], bytes]]:
        return [request for request in self.requests if request[1].split("?")[0] == f"/peer/{path}"]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.method, request.path_qs, dict(request.headers), body))
        answer = self.answers.get(request.match_info["path"])
        if answer is not None:
            return answer(request)
        text = body.decode("utf-8", "replace")
        return web.json_response({"path": request.match_info["path"], "body": text, "query": dict(request.query)})


class Served:
    """An engine behind real sockets, on a thread of its own."""

    def __init__(self, background: BackgroundServer, server: Server, engine: Engine, peer: Peer) -> None:
        self.background = background
        self.server = server
        self.engine = engine
        self.peer = peer
        self.url = server.url
        self.peer_url = f"{server.url}/peer"

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's loop."""

        async def run() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return self.background.call(run())

    def deploy(self, name: str, source: str, **options: Any) -> str:
        workflow = f"{PARENT}/workflows/{name}"
        self.call(lambda: self.engine.deploy(workflow, source, **options))
        return workflow

    def run(self, source: str, argument: Any = None, name: str = "flow", **options: Any) -> Any:
        """The finished record of one execution."""
        workflow = self.deploy(name, source, **options)
        record = self.call(lambda: self.engine.create_execution(workflow, json.dumps(argument)))
        return self.call(lambda: self.engine.wait(record.name))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    engines: list[Engine] = []
    peer = Peer()

    def build() -> list[Any]:
        engine = Engine(
            Database(tmp_path / "stack.db"),
            clock=SystemClock(),
            token=lambda kind, audience: f"{kind}:{audience}",
            authorize=lambda headers: "stranger" not in headers.get("Authorization", ""),
        )
        engines.append(engine)
        return [WorkflowsEmulator(engine), peer]

    background = BackgroundServer(build)
    with background as server:
        engines[0].callback_base_url = server.url
        yield Served(background, server, engines[0], peer)
