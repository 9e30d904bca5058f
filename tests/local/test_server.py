"""The shutdown of the emulators' server."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from tests.patience import PATIENCE_SECONDS, looks

from dropforge_local.base import ports
from dropforge_local.base.db import Database
from dropforge_local.base.ports import HOST
from dropforge_local.base.recording import CALLERS
from dropforge_local.base.server import BackgroundServer, Server

STOPS = 20  # in each, some connections of a client coincide with the close of the listener


class Part:
    """An emulator without an API. It counts its stops; with `fails`, `stop` raises an error."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.stops = 0

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return []

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return []

    async def start(self) -> None:
        """Start nothing: this part has no background task."""

    async def stop(self) -> None:
        self.stops += 1
        if self.fails:
            raise RuntimeError("cannot stop")


class Everybody:
    """Callers who all may do everything."""

    def enter(self, headers: Mapping[str, str], address: str, path: str = "") -> None:
        """Let every request pass."""


def assert_nothing_listens(url: str) -> None:
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=60)


def test_every_part_stops_when_one_raises() -> None:
    parts = [Part(), Part(fails=True), Part()]

    async def run() -> str:
        server = Server(parts)
        await server.start()
        with pytest.raises(RuntimeError, match="cannot stop"):
            await server.stop()
        return server.url

    assert_nothing_listens(asyncio.run(run()))
    assert [part.stops for part in parts] == [1, 1, 1]


def test_the_server_closes_a_connection_that_has_no_requests_for_its_time() -> None:
    async def run() -> tuple[bytes, bytes]:
        server = Server([Part()], keep_alive_seconds=0.01)
        await server.start()
        reader, writer = await asyncio.open_connection(HOST, server.http_port)
        writer.write(b"GET /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(PATIENCE_SECONDS):
            status, rest = await reader.readline(), await reader.read()
        writer.close()
        await server.stop()
        return status, rest

    status, rest = asyncio.run(run())
    assert status.split()[1] == b"501"
    assert rest.endswith(b"}")


def test_background_server_ends_its_thread_when_a_part_cannot_stop() -> None:
    before = threading.enumerate()
    with pytest.raises(RuntimeError, match="cannot stop"), BackgroundServer(lambda: [Part(fails=True)]) as server:
        url = server.url
    assert_nothing_listens(url)
    # gRPC keeps a polling thread, and ends it some time later.
    begun = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not any("run_forever" in name for name in begun)


def test_background_server_leaves_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the fsync any more, and it lasts until the server has ended its tasks."""
    begun = threading.Event()
    tasks: set[asyncio.Task[Any]] = set()

    def slow(log: Path) -> None:
        begun.set()
        assert any(tasks and all(task.done() for task in tasks) for _ in looks(60))

    async def begin_an_fsync() -> None:
        db = Database(tmp_path / "state.db")
        with db.transaction() as sql:
            sql.execute("CREATE TABLE t (x)")
        waiting = asyncio.create_task(db.durable())
        await asyncio.to_thread(begun.wait, 60)
        waiting.cancel()
        tasks.update(asyncio.all_tasks() - {asyncio.current_task()})

    monkeypatch.setattr("dropforge_local.base.db._fsync", slow)
    background = BackgroundServer(lambda: [Part()])
    with background:
        background.call(begin_an_fsync())
    assert len(tasks) >= 2
    assert all(task.done() for task in tasks)


def test_a_caller_whose_port_was_taken_while_the_stack_was_down_gets_another(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as http, socket.socket() as grpc_socket:
        for taken in (http, grpc_socket):
            taken.bind((HOST, 0))
            taken.listen()
        kept = (http.getsockname()[1], grpc_socket.getsockname()[1])

        async def run() -> dict[str, tuple[int, int]]:
            server = Server([], callers=Everybody())
            server.kept_ports = {CALLERS[0]: kept}
            await server.start()
            try:
                return {caller: (server.http_ports[caller], server.grpc_ports[caller]) for caller in CALLERS}
            finally:
                await server.stop()

        ports = asyncio.run(run())
    assert set(kept).isdisjoint(ports[CALLERS[0]])
    assert len({port for pair in ports.values() for port in pair}) == 2 * len(CALLERS)
    assert [f"the port of {CALLERS[0]} is taken" in message for message in caplog.messages] == [True, True]


def test_a_server_that_starts_again_gives_its_ports_to_no_other_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listeners without a port from before are bound first, and the only other free ports are those from before."""
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind((HOST, 0))
        grpc_port, spare = (free.getsockname()[1] for free in (first, second))
    monkeypatch.setattr(ports, "STACK_PORTS", [grpc_port, spare])
    monkeypatch.setattr("random.sample", lambda among, _: list(among))

    async def run() -> tuple[int, int]:
        server = Server([], http_port=0, grpc_port=grpc_port)
        await server.start()
        await server.stop()
        return server.http_port, server.grpc_port

    assert asyncio.run(run()) == (spare, grpc_port)


def connect_until_refused(port: int, clients: list[socket.socket]) -> None:
    while True:
        clients.append(socket.socket())
        if clients[-1].connect_ex((HOST, port)):
            return


def test_a_client_that_connects_while_the_server_stops_leaves_no_open_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The warning about an open connection would fail a later test, in which its garbage is collected."""
    messages: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", ResourceWarning)
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: messages.append(str(message)))
        for _ in range(STOPS):
            clients: list[socket.socket] = []
            with BackgroundServer(lambda: [Part()]) as server:
                thread = threading.Thread(target=connect_until_refused, args=(server.http_port, clients))
                thread.start()
                while not clients:
                    time.sleep(0.001)
            thread.join()
            for client in clients:
                client.close()
        gc.collect()
    assert not messages, "\n".join(messages)
