"""The parts of base/server's Emulator that emulators share."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from aiohttp import web

from . import rpc
from .routing import Route, mount


class PassiveEmulator:
    """Without gRPC services and without background work. A subclass adds `routes`."""

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return ()

    async def start(self) -> None:
        """Nothing runs in the background."""

    async def stop(self) -> None:
        """Nothing to stop; the state stays in the database."""


class RpcEmulator(PassiveEmulator):
    """Serves gRPC services, also over REST by their HTTP rules. A subclass sets `_services`."""

    _services: Sequence[rpc.Service]

    def own_routes(self) -> Sequence[Route]:
        """The routes that no HTTP rule has. They come before the others."""
        return ()

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return mount([*self.own_routes(), *rpc.rest_routes(self._services)])

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return rpc.grpc_handlers(self._services)
