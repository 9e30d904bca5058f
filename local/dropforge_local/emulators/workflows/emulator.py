"""Workflow Executions v1, with callbacks and step entries, and Workflows v1, over the engine's state.

The Python client speaks gRPC, which has fewer fields than REST; gcloud and the senders of callbacks speak REST.
"""

from __future__ import annotations

from collections.abc import Sequence

from workflows_engine import Engine

from ..kit import rpc
from ..kit.emulator import RpcEmulator
from ..kit.routing import Route
from . import admin, executions
from .rest import Rest


class WorkflowsEmulator(RpcEmulator):
    """The two APIs of Cloud Workflows. The engine starts and stops with it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._workflows = admin.Workflows(engine)
        self._services = (
            rpc.Service(
                "google.cloud.workflows.executions.v1.Executions", executions.METHODS, executions.Executions(engine)
            ),
            rpc.Service("google.cloud.workflows.v1.Workflows", admin.METHODS, self._workflows),
        )

    def own_routes(self) -> Sequence[Route]:
        return [*Rest(self.engine).routes(), *self._workflows.routes()]

    async def start(self) -> None:
        await self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()
