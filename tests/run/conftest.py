"""A server of Cloud Storage for the tests of stored objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.storage import StorageEmulator


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a client of an emulator of Cloud Storage without buckets."""
    directory = tmp_path_factory.mktemp("storage")

    def build() -> list[StorageEmulator]:
        return [StorageEmulator(Database(directory / "state.db"), directory / "blobs", SystemClock())]

    with BackgroundServer(build) as server:
        options = {"api_endpoint": server.url}
        client = storage.Client(project="p", credentials=AnonymousCredentials(), client_options=options)
        yield client
        client.close()
