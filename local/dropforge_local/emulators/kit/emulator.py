"""The default emulator: without gRPC services and without background work."""

from __future__ import annotations

from collections.abc import Sequence

import grpc


class PassiveEmulator:
    """Defaults for base/server's Emulator. A subclass adds `routes`."""

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return ()

    async def start(self) -> None:
        """Nothing runs in the background."""

    async def stop(self) -> None:
        """Nothing to stop; the state stays in the database."""
