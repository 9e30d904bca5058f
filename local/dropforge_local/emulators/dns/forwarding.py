"""What stands for name resolution on a laptop: for each name a port, from which connections go to the name's address.

A connection goes to the address that the name had when the last one was resolved, for as long as the record's ttl: so a
client here meets an old address as long as one in the cloud does. A connection that exists stays where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

from dropforge_local.base.clock import Clock
from dropforge_local.base.ports import HOST

CHUNK = 64 * 1024


class Resolved(NamedTuple):
    """An address, and until when a client may use it without asking again."""

    address: str
    until: float


class Forwarder:
    """The listeners of all names. `resolve` gives the address of a host and its ttl; None: there is no such record."""

    def __init__(self, clock: Clock, resolve: Callable[[str], tuple[str, int] | None]) -> None:
        self._clock = clock
        self._resolve = resolve
        self._servers: dict[int, asyncio.Server] = {}
        self._cached: dict[str, Resolved] = {}
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, local: int, host: str, port: int) -> None:
        """Forward connections to a local port to a port of whatever has the name. Raises OSError."""
        if local in self._servers:
            return

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connect(host, port, reader, writer)

        self._servers[local] = await asyncio.start_server(connect, HOST, local)

    async def stop(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connect(self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server calls this in a task"
        self._connections.add(task)
        try:
            if (address := self._address(host)) is not None:
                await _join(reader, writer, address, port)
        except OSError:
            pass  # nothing listens there: the client's connection ends
        finally:
            self._connections.discard(task)
            writer.close()

    def _address(self, host: str) -> str | None:
        now = self._clock.now()
        cached = self._cached.get(host)
        if cached is None or cached.until <= now:
            found = self._resolve(host)
            if found is None:
                return None
            cached = self._cached[host] = Resolved(found[0], now + found[1])
        return cached.address


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, port: int) -> None:
    """Copy both directions until both have ended."""
    upstream, downstream = await asyncio.open_connection(address, port)
    try:
        await asyncio.gather(_copy(reader, downstream), _copy(upstream, writer))
    finally:
        downstream.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
