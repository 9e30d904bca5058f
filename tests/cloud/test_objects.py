"""Objects that a container may have written, read from the emulated Cloud Storage with Google's client."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from dropforge.cloud.objects import read_at_most
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.storage import StorageEmulator

LIMIT = 1000


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Any]:
    def build() -> list[StorageEmulator]:
        return [StorageEmulator(Database(tmp_path / "state.db"), tmp_path / "blobs", SystemClock())]

    with BackgroundServer(build) as server:
        client = storage.Client("p", AnonymousCredentials(), client_options={"api_endpoint": server.url})
        yield client.create_bucket("runs")
        client.close()


def test_no_more_than_the_limit_is_read(bucket: Any) -> None:
    for size, read in ((0, 0), (1, 1), (LIMIT, LIMIT), (LIMIT + 1, LIMIT), (50 * LIMIT, LIMIT)):
        bucket.blob("o").upload_from_string(b"x" * size)
        assert read_at_most(bucket.blob("o"), LIMIT) == b"x" * read
    assert read_at_most(bucket.blob("missing"), LIMIT) is None


def test_a_compressed_object_is_not_decompressed(bucket: Any) -> None:
    blob = bucket.blob("bomb")
    blob.content_encoding = "gzip"
    bomb = gzip.compress(b"0" * 10_000_000)
    blob.upload_from_string(bomb)
    assert read_at_most(bucket.blob("bomb"), LIMIT) == bomb[:LIMIT]
