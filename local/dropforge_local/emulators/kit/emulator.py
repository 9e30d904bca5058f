"""What an emulator does unless it says otherwise: it has no gRPC services and no background work."""

from __future__ import annotations

from collections.abc import Sequence

import grpc


class PassiveEmulator:
    """The defaults of base/server's Emulator; a subclass adds `routes`."""

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return ()

    async def start(self) -> None:
        """Nothing runs in the background."""

    async def stop(self) -> None:
        """Nothing to stop; the state stays in the database."""
