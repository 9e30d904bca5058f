"""Workflow Executions v1, with callbacks and step entries, and Workflows v1, over the engine's state.

The Python client speaks gRPC, which has fewer fields than REST; gcloud and the senders of callbacks speak REST.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workflows_engine import Engine

from ..kit import rpc
from ..kit.access import Guarded, guarded
from ..kit.emulator import RpcEmulator
from ..kit.routing import Route
from . import admin, executions, permissions
from .rest import Rest


class WorkflowsEmulator(RpcEmulator):
    """The two APIs of Cloud Workflows. The engine starts and stops with it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._workflows = admin.Workflows(engine)
        self._services = (
            rpc.Service(
                "google.cloud.workflows.executions.v1.Executions",
                executions.METHODS,
                Guarded(executions.Executions(engine), permissions.EXECUTIONS),
            ),
            rpc.Service(
                "google.cloud.workflows.v1.Workflows",
                admin.METHODS,
                Guarded(self._workflows, permissions.WORKFLOWS),
            ),
        )

    def own_routes(self) -> Sequence[Route]:
        routes = [*Rest(self.engine).routes(), *self._workflows.routes()]
        needs = permissions.REST
        return [replace(route, handler=guarded(route.handler, needs[route.handler.__name__])) for route in routes]

    async def start(self) -> None:
        await self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()
