"""Restarts, SIGKILL in the middle of uploads, stray blobs, and a full disk."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import requests

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Server
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.emulators.storage.blobs import SMALL_BYTES
from dropforge_local.emulators.storage.preconditions import Preconditions
from dropforge_local.emulators.storage.uploads import LIFETIME_SECONDS, Upload
from workflows_engine import VirtualClock

from ..own_process import OwnProcess, Ready
from .conftest import Api, Running

KIB256 = 256 * 1024


def test_state_survives_a_restart(start: Callable[[], Running]) -> None:
    api = start().api
    bucket = api.bucket(labels={"a": "b"}, versioning={"enabled": True})
    first = api.put(bucket, "x", b"1").json()
    api.object("PATCH", bucket, "x", json={"metadata": {"k": "v"}})
    api.put(bucket, "x", b"2")
    again = start().api
    assert again.call("GET", f"b/{bucket}").json()["labels"] == {"a": "b"}
    old = again.object("GET", bucket, "x", params={"generation": first["generation"]}).json()
    assert (old["metadata"], old["metageneration"], old["etag"] != first["etag"]) == ({"k": "v"}, "2", True)
    assert again.object("GET", bucket, "x", params={"alt": "media"}).content == b"2"


def test_generations_increase_across_restart_and_deletion(start: Callable[[], Running]) -> None:
    generations, bucket = [], start().api.bucket()
    for _ in range(3):
        api = start().api
        for _ in range(3):
            generations.append(int(api.put(bucket, "x", b"1").json()["generation"]))
            api.object("DELETE", bucket, "x")
    assert generations == sorted(set(generations))


def test_stray_blobs_are_removed_at_start(start: Callable[[], Running]) -> None:
    running = start()
    bucket = running.api.bucket()
    running.api.put(bucket, "x", b"1")
    running.api.send(running.api.start_upload(bucket, "y"), b"a" * KIB256, f"bytes 0-{KIB256 - 1}/*")
    kept = running.blobs()
    stray = running.blob_dir / "ab" / "abcdef"
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"written, never committed")
    assert start().blobs() == kept
    assert len(kept) == 2


def test_sessions_end_after_a_week(tmp_path: Path) -> None:
    db, clock = Database(":memory:"), VirtualClock()
    uploads = StorageEmulator(db, tmp_path, clock)._state.uploads
    upload_id = "session"
    uploads.start(Upload(upload_id, 0, "bucket", "x", {}, Preconditions(), {}, "blob"))
    for passed, left in ((LIFETIME_SECONDS - 1, 1), (2, 0)):
        clock.advance(clock.now() + passed)
        StorageEmulator(db, tmp_path, clock)
        assert len(db.connection.execute("SELECT 1 FROM storage_uploads WHERE id = ?", (upload_id,)).fetchall()) == left
    db.close()


def test_full_disk_is_reported_and_leaves_no_object(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    api, bucket = running.api, running.api.bucket()
    url = api.start_upload(bucket, "resumable")
    large = os.urandom(SMALL_BYTES + 1)
    content_range = f"bytes 0-{SMALL_BYTES}/{SMALL_BYTES + 1}"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        reply = api.put(bucket, "x", os.urandom(3_000_000))
        assert (reply.status_code, reply.json()["error"]["errors"][0]["reason"]) == (507, "insufficientStorage")
        assert "No space left on device" in reply.text
        assert api.send(url, large, content_range).status_code == 507
    assert api.object("GET", bucket, "x").status_code == 404
    assert api.put(bucket, "x", b"1").status_code == 200
    assert api.send(url, large, content_range).json()["size"] == str(len(large))
    assert api.object("GET", bucket, "resumable", params={"alt": "media"}).content == large
    assert len(running.blobs()) == 2


def test_full_database_is_reported_and_leaves_no_object(tmp_path: Path) -> None:
    def build() -> list[StorageEmulator]:
        db = Database(tmp_path / "state.sqlite")
        emulator = StorageEmulator(db, tmp_path / "blobs", VirtualClock())
        emulator.create_bucket("bucket")
        pages = db.connection.execute("PRAGMA page_count").fetchone()[0]
        db.connection.execute(f"PRAGMA max_page_count = {pages + 4}")
        return [emulator]

    with BackgroundServer(build) as server:
        api = Api(server.url)
        metadata = {"k": "v" * 4000}
        replies = []
        for index in range(20):
            url = api.upload("POST", "bucket", {"uploadType": "media", "name": f"o{index}"}, data=b"x")
            replies.append(url.status_code)
            if url.status_code == 200:
                replies.append(api.object("PATCH", "bucket", f"o{index}", json={"metadata": metadata}).status_code)
        assert set(replies) == {200, 507}
        listed = api.call("GET", "b/bucket/o").json()["items"]
        with closing(sqlite3.connect(tmp_path / "state.sqlite")) as connection:
            assert connection.execute("SELECT count(*) FROM storage_small").fetchone()[0] == len(listed)
        api.session.close()


def content_of(name: str, size: int) -> bytes:
    """Bytes that a reader can compute from the name."""
    seed = hashlib.sha256(name.encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


@contextmanager
def server_process(root: Path) -> Iterator[tuple[OwnProcess, Api]]:
    process = OwnProcess(serve, root)
    try:
        with requests.Session() as session:
            yield process, Api(process.said, session)
    finally:
        process.kill()


async def serve(root: Path, ready: Ready) -> None:
    server = Server([StorageEmulator(Database(root / "state.sqlite"), root / "blobs", SystemClock())])
    await server.start()
    ready(server.url)
    await asyncio.Event().wait()


class Uploader(threading.Thread):
    """Upload objects of many sizes in turn until the server is killed; record the acknowledged objects."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__()
        self.acknowledged: dict[str, int] = {}
        self._url = url
        self._number = number

    def run(self) -> None:
        random_sizes = random.Random(self._number)
        with requests.Session() as session:
            api = Api(self._url, session)
            for index in range(10_000):
                size = random_sizes.choice([0, 100, 5000, 3 * KIB256, 2_000_000])
                name = f"{self._number}/{index}/{size}"
                try:
                    self._upload(api, name, size)
                except requests.RequestException:
                    return

    def _upload(self, api: Api, name: str, size: int) -> None:
        data = content_of(name, size)
        if size > KIB256:
            url = api.start_upload("bucket", name)
            api.send(url, data[:KIB256], f"bytes 0-{KIB256 - 1}/{size}")
            reply = api.send(url, data[KIB256:], f"bytes {KIB256}-{size - 1}/{size}")
        else:
            reply = api.put("bucket", name, data)
        assert reply.status_code == 200, reply.text
        self.acknowledged[name] = int(reply.json()["generation"])


def check_after_kill(root: Path, api: Api, acknowledged: dict[str, int]) -> None:
    """Every acknowledged object exists, every object is complete, and every blob belongs to an object."""
    stored: dict[str, int] = {}
    token = ""
    while True:
        body = api.call("GET", "b/bucket/o", params={"pageToken": token, "maxResults": 500}).json()
        stored |= {item["name"]: int(item["generation"]) for item in body.get("items", [])}
        token = body.get("nextPageToken", "")
        if not token:
            break
    assert acknowledged.items() <= stored.items()
    for name in stored:
        expected = content_of(name, int(name.rsplit("/", 1)[1]))
        assert api.object("GET", "bucket", name, params={"alt": "media"}).content == expected, name
    with closing(sqlite3.connect(root / "state.sqlite")) as connection:
        rows = connection.execute(
            "SELECT blob FROM storage_objects UNION SELECT blob FROM storage_uploads WHERE blob IS NOT NULL"
        )
        named = {row[0] for row in rows}
    assert {path.name for path in (root / "blobs").glob("??/*")} <= named


@pytest.mark.slow
def test_killed_in_the_middle_of_uploads(tmp_path: Path) -> None:
    acknowledged: dict[str, int] = {}
    with server_process(tmp_path) as (_, api):
        api.call("POST", "b", params={"project": "p"}, json={"name": "bucket"})
    for round_number in range(4):
        with server_process(tmp_path) as (process, api):
            uploaders = [Uploader(api.url, round_number * 10 + number) for number in range(4)]
            for uploader in uploaders:
                uploader.start()
            while sum(len(uploader.acknowledged) for uploader in uploaders) < 15:
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.7))  # a random moment for the kill
            process.kill()
            for uploader in uploaders:
                uploader.join(60)
                acknowledged |= uploader.acknowledged
        with server_process(tmp_path) as (_, api):
            check_after_kill(tmp_path, api, acknowledged)
    assert len(acknowledged) > 50
    assert len(set(acknowledged.values())) == len(acknowledged)
