"""Holds and retention policies, with the real client: what keeps an object, and what ends that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import storage

from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.storage import StorageEmulator
from workflows_engine import VirtualClock

from .conftest import make_client

Advance = Callable[[float], None]


@pytest.fixture
def bucket_in_time(tmp_path: Path) -> Iterator[tuple[storage.Bucket, Advance]]:
    """A bucket, and how its time passes."""
    clock = VirtualClock()
    background = BackgroundServer(lambda: [StorageEmulator(Database(tmp_path / "db"), tmp_path / "blobs", clock)])

    def advance(seconds: float) -> None:
        async def move() -> None:
            clock.advance(clock.now() + seconds)

        background.call(move())

    with background as server:
        client = make_client(server.url)
        yield client.create_bucket("the-bucket"), advance
        client.close()


def put(bucket: storage.Bucket, name: str = "a") -> storage.Blob:
    blob = bucket.blob(name)
    blob.upload_from_string(b"x", retry=None)
    return blob


def assert_kept(blob: storage.Blob, reason: str) -> None:
    for remove in (blob.delete, lambda **_: put(blob.bucket, blob.name)):
        with pytest.raises(exceptions.Forbidden) as refused:
            remove(retry=None)
        assert refused.value.response.json()["error"]["errors"][0]["reason"] == reason
    assert blob.download_as_bytes() == b"x"


@pytest.mark.parametrize("hold", ["temporary_hold", "event_based_hold"])
def test_a_hold_keeps_an_object_until_it_is_removed(bucket: storage.Bucket, hold: str) -> None:
    blob = put(bucket)
    setattr(blob, hold, True)
    blob.patch()
    assert getattr(bucket.get_blob("a"), hold) is True
    assert_kept(blob, "objectUnderActiveHold")
    copied = bucket.copy_blob(blob, bucket, "copy")
    assert not getattr(copied, hold)
    setattr(blob, hold, False)
    blob.patch()
    blob.delete()


def test_a_bucket_may_hold_new_objects(bucket: storage.Bucket) -> None:
    bucket.default_event_based_hold = True
    bucket.patch()
    assert put(bucket).event_based_hold is True


def test_a_retention_policy_keeps_objects_for_its_time(bucket_in_time: tuple[storage.Bucket, Advance]) -> None:
    bucket, advance = bucket_in_time
    bucket.retention_period = 100
    bucket.patch()
    assert (bucket.retention_period, bucket.retention_policy_locked) == (100, None)
    assert bucket.retention_policy_effective_time is not None
    blob = put(bucket)
    advance(99)
    assert_kept(blob, "retentionPolicyNotMet")
    advance(1)
    blob.delete()


def test_retention_starts_when_an_event_based_hold_ends(bucket_in_time: tuple[storage.Bucket, Advance]) -> None:
    bucket, advance = bucket_in_time
    bucket.retention_period, bucket.default_event_based_hold = 100, True
    bucket.patch()
    blob = put(bucket)
    advance(1000)
    blob.event_based_hold = False
    blob.patch()
    assert_kept(blob, "retentionPolicyNotMet")
    advance(100)
    blob.delete()


def test_a_locked_policy_can_only_be_longer(api: Any, bucket: storage.Bucket) -> None:
    path = f"b/{bucket.name}/lockRetentionPolicy"
    assert api.call("POST", path, params={"ifMetagenerationMatch": "1"}).status_code == 400  # without a policy
    bucket.retention_period = 100
    bucket.patch()
    bucket.lock_retention_policy()
    assert bucket.retention_policy_locked is True
    for shorter in (50, None):
        bucket.retention_period = shorter
        with pytest.raises(exceptions.Forbidden, match="locked"):
            bucket.patch()
        with pytest.raises(exceptions.Forbidden, match="locked"):
            bucket.update()
    bucket.reload()
    bucket.retention_period = 200
    bucket.patch()
    assert (bucket.retention_period, bucket.retention_policy_locked) == (200, True)


@pytest.mark.parametrize("period", ["x", "0", "-1", "9999999999", {}, None])
def test_wrong_periods_are_refused(api: Any, period: object) -> None:
    answer = api.call(
        "POST",
        "b",
        params={"project": "p"},
        json={"name": "wrong-period", "retentionPolicy": {"retentionPeriod": period}},
    )
    assert answer.status_code == 400, answer.text
