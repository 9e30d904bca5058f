"""A cluster that stops cuts every connection at once, whatever its client does."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import sysconfig
from asyncio import sslproto
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dropforge_local.emulators.kubernetes import KubernetesEmulator

from .conftest import NAME, build_emulator

AT_ONCE_SECONDS = 20.0  # asyncio alone would wait 30 s for a client's goodbye
ROOT = Path(__file__).resolve().parents[3]
PACKAGES = sysconfig.get_path("purelib")
DEBIAN = Path("/usr/bin/python3.11")  # 3.11.2 is the oldest one that the project runs on
RAN_BY = "DROPFORGE_TEST_RAN_BY"
NO_DEBIAN = "Debian's Python 3.11 is not installed, or runs this test"
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


def test_every_connection_is_cut_when_one_cannot_be(
    with_client: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first abort raises: the other connection is cut nevertheless, nothing listens, and the error is told."""
    abort: Any = sslproto._SSLProtocolTransport.abort
    left: list[Any] = []  # the TCP transport of the first connection

    def abort_but_the_first(transport: Any) -> None:
        if not left:
            left.append(transport._ssl_protocol._transport)
            raise RuntimeError("cannot abort")
        abort(transport)

    async def work(emulator: KubernetesEmulator, client: Client) -> None:
        other = Client(emulator)
        await other.connect()
        for each in (client, other):
            assert b"200 OK" in await each.ask(ALIVE + b"\r\n")
        with pytest.raises(RuntimeError, match="cannot abort"):
            await emulator.stop()
        cuts = [asyncio.create_task(each.wait_until_cut()) for each in (client, other)]
        done, waiting = await asyncio.wait(cuts, timeout=AT_ONCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        assert done
        left[0].abort()
        await asyncio.gather(*waiting)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", client.port)

    monkeypatch.setattr(sslproto._SSLProtocolTransport, "abort", abort_but_the_first)
    with_client(work)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11) or not DEBIAN.exists() or RAN_BY in os.environ, reason=NO_DEBIAN)
def test_debian_s_python_cuts_them_too() -> None:
    """The tests of this file, by Debian's own Python 3.11 with this environment's packages."""
    path = os.pathsep.join([PACKAGES, *(str(ROOT / folder) for folder in ("", "functions", "local", "cli"))])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", RAN_BY: "another Python"}
    command = [str(DEBIAN), "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
