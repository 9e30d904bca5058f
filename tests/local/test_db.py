"""The durability of the database: a confirmed commit survives a kill and a power cut."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import requests
from google.cloud.pubsub_v1 import types
from tests.patience import PATIENCE_SECONDS

from dropforge_local.base import db as db_module
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Server
from dropforge_local.emulators.pubsub import PubSubEmulator

TOPIC = "projects/local-project/topics/events"


class SlowDisk:
    """A replacement of the sync of the log that returns when the test allows it; by default it returns at once."""

    def __init__(self) -> None:
        self.calls = 0
        self.begun, self.allowed = threading.Event(), threading.Event()
        self.allowed.set()
        self._sync = db_module._sync_data

    def __call__(self, descriptor: int) -> None:
        self.calls += 1
        self.begun.set()
        assert self.allowed.wait(60)
        self._sync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    disk = SlowDisk()
    monkeypatch.setattr(db_module, "_sync_data", disk)
    return disk


def test_waiters_share_a_single_fsync(tmp_path: Path, disk: SlowDisk) -> None:
    async def run() -> None:
        db = Database(tmp_path / "state.db")
        with db.transaction() as sql:
            sql.execute("CREATE TABLE t (x)")

        async def write(number: int) -> None:
            with db.transaction() as sql:
                sql.execute("INSERT INTO t VALUES (?)", (number,))
            await db.durable()

        await asyncio.gather(*(write(number) for number in range(50)))
        assert disk.calls == 1
        await db.durable()
        assert disk.calls == 1, "no write happened after the fsync"
        db.close()

    asyncio.run(run())


def test_commit_during_an_fsync_waits_for_the_next_fsync(tmp_path: Path, disk: SlowDisk) -> None:
    async def run() -> None:
        db = Database(tmp_path / "state.db")
        with db.transaction() as sql:
            sql.execute("CREATE TABLE t (x)")
        disk.allowed.clear()
        first = asyncio.create_task(db.durable())
        await asyncio.to_thread(disk.begun.wait, 20)
        with db.transaction() as sql:
            sql.execute("INSERT INTO t VALUES (1)")
        second = asyncio.create_task(db.durable())
        await asyncio.sleep(0)
        disk.allowed.set()
        await asyncio.gather(first, second)
        assert disk.calls == 2
        db.close()

    asyncio.run(run())


def test_failing_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        db = Database(tmp_path / "state.db")
        with db.transaction() as sql:
            sql.execute("CREATE TABLE t (x)")

        def broken(descriptor: int) -> None:
            raise OSError("input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(db_module, "_sync_data", broken)
            with pytest.raises(OSError, match="input/output error"):
                await db.durable()
        await db.durable()
        db.close()

    asyncio.run(run())


@pytest.mark.parametrize("speak", ["rest", "grpc"])
def test_answers_wait_for_the_disk(tmp_path: Path, disk: SlowDisk, speak: str) -> None:
    databases: list[Database] = []

    def build() -> list[PubSubEmulator]:
        databases.append(Database(tmp_path / "state.db"))
        emulator = PubSubEmulator(databases[0], SystemClock())
        emulator.create_topic(TOPIC)
        return [emulator]

    with BackgroundServer(build) as server, ThreadPoolExecutor(1) as threads:
        server.durable = databases[0].durable
        publish = {"rest": publish_by_rest, "grpc": publish_by_grpc}[speak]
        publish(server)()
        call = publish(server)
        disk.begun.clear()
        disk.allowed.clear()
        answer: Future[str] = threads.submit(call)
        assert disk.begun.wait(60)
        assert not answer.done()
        disk.allowed.set()
        assert int(answer.result(20)) > 0


def publish_by_rest(server: Server) -> Callable[[], str]:
    def call() -> str:
        answer = requests.post(f"{server.url}/v1/{TOPIC}:publish", json={"messages": [{"data": "eA=="}]}, timeout=60)
        return str(answer.json()["messageIds"][0])

    return call


def publish_by_grpc(server: Server) -> Callable[[], str]:
    def call() -> str:
        request = types.PublishRequest.pb()(topic=TOPIC, messages=[{"data": b"x"}])
        with grpc.insecure_channel(server.grpc_address) as channel:
            publish = channel.unary_unary(
                "/google.pubsub.v1.Publisher/Publish",
                request_serializer=types.PublishRequest.pb().SerializeToString,
                response_deserializer=types.PublishResponse.pb().FromString,
            )
            return str(publish(request, timeout=PATIENCE_SECONDS).message_ids[0])

    return call
