"""A served Workflows emulator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Server
from dropforge_local.emulators.workflows import WorkflowsEmulator
from workflows_engine import Engine, SystemClock

PARENT = "projects/test-project/locations/europe-west4"


class Served:
    """An engine behind the emulator's REST and gRPC servers, on a thread of its own."""

    def __init__(self, background: BackgroundServer, server: Server, engine: Engine) -> None:
        self.background = background
        self.server = server
        self.engine = engine
        self.url = server.url

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


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    engines: list[Engine] = []

    def build() -> list[Any]:
        engines.append(Engine(Database(tmp_path / "stack.db"), clock=SystemClock()))
        return [WorkflowsEmulator(engines[0])]

    background = BackgroundServer(build)
    with background as server:
        engines[0].callback_base_url = server.url
        yield Served(background, server, engines[0])
