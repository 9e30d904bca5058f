"""A power cut loses the commits after the last fsync. It costs reads, which are sent again, and nothing else."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from workflows_engine import Engine, HttpRequest, HttpResponse, SqliteDatabase, SystemClock
from workflows_engine.engine import effect_tasks

FLOW = "projects/p/locations/l/workflows/flow"
READS = "".join(f"    - r{n}: {{call: http.get, args: {{url: 'http://peer/r{n}'}}}}\n" for n in range(20))
LAST = "    - last: {call: http.get, args: {url: 'http://peer/last'}}\n"
TOLD = """
main:
  steps:
    - a: {call: http.get, args: {url: "http://peer/a"}}
    - b: {call: http.get, args: {url: "http://peer/b"}}
    - tell: {call: http.post, args: {url: "http://peer/tell"}}
    - c: {call: http.get, args: {url: "http://peer/c"}}
    - d: {call: http.get, args: {url: "http://peer/d"}}
    - last: {call: http.get, args: {url: "http://peer/last"}}
    - done: {return: "done"}
"""
PARALLEL = """
main:
  steps:
    - both:
        parallel:
          branches:
            - one:
                steps:
                  - tell: {call: http.post, args: {url: "http://peer/tell"}}
            - two:
                steps:
                  - a: {call: http.get, args: {url: "http://peer/a"}}
                  - b: {call: http.get, args: {url: "http://peer/b"}}
    - last: {call: http.get, args: {url: "http://peer/last"}}
    - done: {return: "done"}
"""


class Disk(SqliteDatabase):
    """A database whose `durable` copies the files to `disk`: what a power cut would leave."""

    def __init__(self, path: Path, disk: Path) -> None:
        super().__init__(path)
        self._path, self.disk = path, disk
        self.syncs = 0
        self.may_sync = asyncio.Event()
        self.may_sync.set()
        disk.mkdir()

    async def durable(self, *, alone: bool = False) -> None:
        await asyncio.sleep(0)  # the fsync takes a moment
        await self.may_sync.wait()
        for file in (self._path, self._path.with_name(f"{self._path.name}-wal")):
            shutil.copy(file, self.disk)
        self.syncs += 1


class Peer:
    """Answers each request, but `last` only when it may; notes the path and the number of syncs before each request."""

    def __init__(self, db: Disk | None = None) -> None:
        self.sent: list[str] = []
        self.syncs: list[int] = []
        self.is_last = asyncio.Event()
        self.may_end = asyncio.Event()
        self._db = db

    async def send(self, request: HttpRequest) -> HttpResponse:
        path = request.url.removeprefix("http://peer/")
        self.sent.append(f"{path} {request.headers['Idempotency-Key']}")
        self.syncs.append(self._db.syncs if self._db else 0)
        if path == "last":
            self.is_last.set()
            await self.may_end.wait()
        return HttpResponse(200, {"Content-Type": "application/json"}, b"1")

    async def close(self) -> None: ...


@asynccontextmanager
async def running(db: SqliteDatabase, peer: Peer) -> AsyncIterator[Engine]:
    engine = Engine(db, clock=SystemClock(), http=peer)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest.fixture(autouse=True)
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effect_tasks, "FLUSH_SECONDS", 3600.0)


async def _cut_at_last(tmp_path: Path, source: str, *, is_slow: bool = False) -> tuple[list[str], list[str]]:
    """The requests before a power cut during the request `last`, and those after it, until the execution's success.

    A slow disk syncs nothing before `last`, and then once before the power cut.
    """
    db = Disk(tmp_path / "state.db", tmp_path / "disk")
    peer, later = Peer(db), Peer()
    if is_slow:
        db.may_sync.clear()
    async with running(db, peer) as engine:
        engine.deploy(FLOW, source)
        name = engine.create_execution(FLOW).name
        await asyncio.wait_for(peer.is_last.wait(), 60)
        db.may_sync.set()
        while is_slow and not db.syncs:
            await asyncio.sleep(0.001)
        shutil.copytree(db.disk, tmp_path / "after")
    later.may_end.set()
    async with running(SqliteDatabase(tmp_path / "after" / "state.db"), later) as engine:
        assert (await asyncio.wait_for(engine.wait(name), 60)).state == "SUCCEEDED"
    return peer.sent, later.sent


@pytest.mark.parametrize("source", [TOLD, PARALLEL], ids=["in order", "in parallel"])
def test_what_was_told_before_a_power_cut_is_not_told_again(tmp_path: Path, source: str) -> None:
    before, after = asyncio.run(_cut_at_last(tmp_path, source))
    assert any(request.startswith("tell ") for request in before)
    assert not any(request.startswith("tell ") for request in after)
    assert set(after) <= set(before)  # the same requests, with the same keys
    assert after[-1].startswith("last ")


def test_reads_share_an_fsync_and_everything_else_waits_for_its_own(tmp_path: Path) -> None:
    async def work() -> tuple[Peer, Peer]:
        db = Disk(tmp_path / "state.db", tmp_path / "disk")
        told, read = Peer(db), Peer(db)
        told.may_end.set()
        for peer, source in ((told, TOLD), (read, f"main:\n  steps:\n{READS}")):
            db.syncs = 0
            async with running(db, peer) as engine:
                engine.deploy(FLOW, source)
                await asyncio.wait_for(engine.wait(engine.create_execution(FLOW).name), 60)
        return told, read

    told, read = asyncio.run(work())
    assert told.syncs == [0, 0, 1, 2, 2, 2]
    assert read.syncs == [0] * 20


def test_reads_are_on_the_disk_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effect_tasks, "FLUSH_SECONDS", 0.0)
    before, after = asyncio.run(_cut_at_last(tmp_path, f"main:\n  steps:\n{READS}{LAST}", is_slow=True))
    assert len(before) == 21
    assert after == before[-1:]
