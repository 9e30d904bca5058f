"""A cluster that stops cuts every connection at once, whatever its client does."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from dropforge_local.emulators.kubernetes import KubernetesEmulator

from .conftest import NAME, build_emulator

AT_ONCE_SECONDS = 20.0  # asyncio alone would wait 30 s for a client's goodbye
T = TypeVar("T")
ALIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"


class Client:
    """A TLS client over bare bytes: it answers no goodbye (close_notify) because it reads no bytes meanwhile."""

    def __init__(self, emulator: KubernetesEmulator) -> None:
        port = emulator.port_of(NAME)
        assert port is not None
        self.port = port
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cadata=emulator.authority_of(NAME))
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        await self._exchange(self.tls.do_handshake)

    async def ask(self, request: bytes) -> bytes:
        self.tls.write(request)
        return await self._exchange(lambda: self.tls.read(4096))

    async def wait_until_cut(self) -> None:
        """Return once the server has closed the TCP connection."""
        try:
            while await self.reader.read(4096):
                pass
        except ConnectionResetError:
            pass
        self.writer.close()

    async def _exchange(self, step: Callable[[], T]) -> T:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self.writer.write(self.outgoing.read())
                self.incoming.write(await self.reader.read(4096))
            finally:
                self.writer.write(self.outgoing.read())


async def assert_cut_at_once(emulator: KubernetesEmulator, client: Client) -> None:
    await emulator.stop()
    await asyncio.wait_for(client.wait_until_cut(), AT_ONCE_SECONDS)


@pytest.fixture
def with_client(tmp_path: Path) -> Callable[[Callable[[KubernetesEmulator, Client], Awaitable[None]]], None]:
    """Run a test's coroutine with a served cluster and a connected client."""

    def run(work: Callable[[KubernetesEmulator, Client], Awaitable[None]]) -> None:
        async def connected() -> None:
            emulator = build_emulator(tmp_path)
            emulator.add_cluster(NAME)
            await emulator.start()
            client = Client(emulator)
            await client.connect()
            await work(emulator, client)

        asyncio.run(connected())

    return run


def test_idle_client_that_never_says_goodbye_is_cut(with_client: Callable[..., None]) -> None:
    async def work(emulator: KubernetesEmulator, client: Client) -> None:
        assert b"200 OK" in await client.ask(ALIVE + b"\r\n")
        await assert_cut_at_once(emulator, client)

    with_client(work)


def test_transport_that_is_already_closed_is_cut(with_client: Callable[..., None]) -> None:
    """The server has closed the connection and waits for the client's goodbye when the stop begins."""

    async def work(emulator: KubernetesEmulator, client: Client) -> None:
        assert b"200 OK" in await client.ask(ALIVE + b"Connection: close\r\n\r\n")
        await assert_cut_at_once(emulator, client)

    with_client(work)


def test_watch_is_cut(with_client: Callable[..., None]) -> None:
    async def work(emulator: KubernetesEmulator, client: Client) -> None:
        head = b"GET /api/v1/pods?watch=1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer good\r\n\r\n"
        assert b"200 OK" in await client.ask(head)
        await assert_cut_at_once(emulator, client)

    with_client(work)
