"""A storage emulator on a free port, with the real client and a plain HTTP session."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import requests
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.storage import ObjectChange, StorageEmulator


@dataclass
class Api:
    """Plain requests to a running emulator, for requests that the client never sends."""

    url: str
    session: requests.Session = field(default_factory=requests.Session)

    def bucket(self, **resource: Any) -> str:
        """A new bucket with a unique name."""
        name = f"b-{uuid.uuid4().hex[:20]}"
        response = self.call("POST", "b", params={"project": "p"}, json={"name": name, **resource})
        assert response.status_code == 200, response.text
        return name

    def call(self, method: str, path: str, **options: Any) -> requests.Response:
        return self.session.request(method, f"{self.url}/storage/v1/{path}", timeout=60, **options)

    def object(self, method: str, bucket: str, name: str, **options: Any) -> requests.Response:
        return self.call(method, f"b/{bucket}/o/{quote(name, safe='')}", **options)

    def put(self, bucket: str, name: str, data: bytes, **params: Any) -> requests.Response:
        """A media upload."""
        headers = params.pop("headers", {})
        return self.upload("POST", bucket, {"uploadType": "media", "name": name, **params}, data=data, headers=headers)

    def upload(self, method: str, bucket: str, params: dict[str, Any], **options: Any) -> requests.Response:
        url = f"{self.url}/upload/storage/v1/b/{bucket}/o"
        return self.session.request(method, url, params=params, timeout=60, **options)

    def start_upload(self, bucket: str, name: str, **params: Any) -> str:
        """Open a resumable session; return its URL."""
        response = self.upload("POST", bucket, {"uploadType": "resumable", "name": name, **params})
        assert response.status_code == 200, response.text
        return response.headers["Location"]

    def send(self, session_url: str, data: bytes, content_range: str, **headers: str) -> requests.Response:
        """One PUT of a resumable session."""
        headers["Content-Range"] = content_range
        return self.session.put(session_url, data=data, headers=headers, timeout=60)


@dataclass
class Running:
    """A running emulator, its events in commit order, its database and its blob directory."""

    api: Api
    client: storage.Client
    changes: list[ObjectChange]
    database: Path
    blob_dir: Path

    def blobs(self) -> list[str]:
        """The names of all blobs: the files, and the rows of small blobs."""
        with closing(sqlite3.connect(self.database)) as connection:
            small = [row[0] for row in connection.execute("SELECT blob FROM storage_small")]
        return sorted([*small, *(path.name for path in self.blob_dir.glob("??/*"))])


def make_client(url: str) -> storage.Client:
    """The real client, connected to the emulator as Google documents it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        return storage.Client(project="local-project", credentials=AnonymousCredentials())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Running]]:
    """Starts emulators on one database and one blob directory. A second start stops the first emulator."""
    stack: list[tuple[BackgroundServer, storage.Client, Api]] = []

    def stop() -> None:
        while stack:
            server, client, api = stack.pop()
            client.close()
            api.session.close()
            server.__exit__(None, None, None)

    def run() -> Running:
        stop()
        changes: list[ObjectChange] = []
        databases: list[Database] = []

        def build() -> list[StorageEmulator]:
            databases.append(Database(tmp_path / "state.sqlite"))
            return [StorageEmulator(databases[0], tmp_path / "blobs", SystemClock(), changes.append)]

        server = BackgroundServer(build)
        url = server.__enter__().url
        running = Running(Api(url), make_client(url), changes, tmp_path / "state.sqlite", tmp_path / "blobs")
        stack.append((server, running.client, running.api))
        return running

    yield run
    stop()


@pytest.fixture
def running(start: Callable[[], Running]) -> Running:
    return start()


@pytest.fixture
def api(running: Running) -> Api:
    return running.api


@pytest.fixture
def client(running: Running) -> storage.Client:
    return running.client


@pytest.fixture
def bucket(running: Running) -> storage.Bucket:
    """A bucket of the real client, new for each test."""
    return running.client.bucket(running.api.bucket())
