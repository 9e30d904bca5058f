"""Events: their types, order and content, and that they commit with the change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.storage import ObjectChange, StorageEmulator

from .conftest import Api, Running


def events(running: Running) -> list[tuple[str, str, str]]:
    return [(c.event, c.resource["name"], c.resource["generation"]) for c in running.changes]


def test_events_of_an_object_from_creation_to_deletion(running: Running) -> None:
    api, bucket = running.api, running.api.bucket()
    first = api.put(bucket, "x", b"1").json()["generation"]
    second = api.put(bucket, "x", b"2").json()["generation"]
    api.object("PATCH", bucket, "x", json={"metadata": {"a": "b"}})
    api.object("DELETE", bucket, "x")
    assert events(running) == [
        ("finalized", "x", first),
        ("deleted", "x", first),
        ("finalized", "x", second),
        ("metadataUpdated", "x", second),
        ("deleted", "x", second),
    ]
    assert running.changes[3].resource["metageneration"] == "2"


def test_versioning_archives(running: Running) -> None:
    api, bucket = running.api, running.api.bucket(versioning={"enabled": True})
    first = api.put(bucket, "x", b"1").json()["generation"]
    second = api.put(bucket, "x", b"2").json()["generation"]
    api.object("DELETE", bucket, "x")
    api.object("DELETE", bucket, "x", params={"generation": first})
    assert [event for event, _, _ in events(running)] == ["finalized", "archived", "finalized", "archived", "deleted"]
    assert events(running)[3] == ("archived", "x", second)
    assert events(running)[4] == ("deleted", "x", first)


def test_resource_is_storage_object_data(running: Running) -> None:
    api, bucket = running.api, running.api.bucket()
    stored = api.put(bucket, "specs/a b.json", b"{}", headers={"Content-Type": "application/json"}).json()
    (change,) = running.changes
    links = {"selfLink", "mediaLink"}
    assert {k: v for k, v in change.resource.items() if k not in links} == {
        k: v for k, v in stored.items() if k not in links
    }
    assert change.resource["selfLink"] == f"https://www.googleapis.com/storage/v1/b/{bucket}/o/specs%2Fa%20b.json"
    assert (change.resource["size"], change.resource["metageneration"]) == ("2", "1")


@pytest.mark.parametrize("verb", ["copyTo", "rewriteTo"])
def test_every_way_to_create_an_object_sends_an_event(running: Running, verb: str) -> None:
    api, bucket = running.api, running.api.bucket()
    api.put(bucket, "s", b"1")
    api.call("POST", f"b/{bucket}/o/s/{verb}/b/{bucket}/o/copy")
    api.call("POST", f"b/{bucket}/o/whole/compose", json={"sourceObjects": [{"name": "s"}]})
    api.send(api.start_upload(bucket, "up"), b"abc", "bytes 0-2/3")
    api.call("POST", f"b/{bucket}/o/s/moveTo/o/moved")
    assert [(event, name) for event, name, _ in events(running)] == [
        ("finalized", "s"),
        ("finalized", "copy"),
        ("finalized", "whole"),
        ("finalized", "up"),
        ("finalized", "moved"),
        ("deleted", "s"),
    ]


def test_refused_calls_send_no_event(running: Running) -> None:
    api, bucket = running.api, running.api.bucket()
    api.put(bucket, "x", b"1")
    api.put(bucket, "x", b"2", ifGenerationMatch=0)
    api.put(bucket, "x", b"2", headers={"X-Goog-Hash": "crc32c=AAAAAA=="})
    api.object("DELETE", bucket, "gone")
    assert [event for event, _, _ in events(running)] == ["finalized"]


def test_writes_of_the_listener_commit_with_the_change(tmp_path: Path) -> None:
    """An outbox row and its object commit together or not at all. Here the listener fails on every second call."""
    databases: list[Database] = []

    def build() -> list[StorageEmulator]:
        db = Database(tmp_path / "state.sqlite")
        db.connection.execute("CREATE TABLE outbox (name TEXT)")
        databases.append(db)
        return [StorageEmulator(db, tmp_path / "blobs", SystemClock(), listener(db))]

    with BackgroundServer(build) as server:
        api = Api(server.url)
        bucket = api.bucket()
        statuses = [api.put(bucket, f"o{index}", b"x").status_code for index in range(4)]
        listed = [item["name"] for item in api.call("GET", f"b/{bucket}/o").json()["items"]]
        api.session.close()
    assert statuses == [200, 500, 200, 500]
    with Database(tmp_path / "state.sqlite").connection as connection:
        assert [row["name"] for row in connection.execute("SELECT name FROM outbox")] == listed == ["o0", "o2"]
        assert connection.execute("SELECT count(*) FROM storage_small").fetchone()[0] == 2
    connection.close()


def listener(db: Database) -> Callable[[ObjectChange], None]:
    calls = iter(range(100))

    def on_change(change: ObjectChange) -> None:
        db.connection.execute("INSERT INTO outbox VALUES (?)", (change.resource["name"],))
        if next(calls) % 2:
            raise RuntimeError("the listener fails")

    return on_change
