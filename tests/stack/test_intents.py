"""Uploads and messages whose reply is lost: the client repeats them, and they are one run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from dropforge.base import names
from dropforge.run.record import RunState

from ..deployments import clients
from .conftest import User
from .test_runs import run_events

HOP = {"connection", "content-length", "date", "server", "transfer-encoding"}


@contextmanager
def losing(upstream: str, status: int | None) -> Iterator[tuple[str, list[str]]]:
    """A proxy that loses the reply of the first upload of an object; its address, and the generations of all uploads.

    `status`: the proxy answers this instead; None: it closes the connection.
    """
    generations: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            sent = {key: value for key, value in self.headers.items() if key.lower() not in HOP | {"host"}}
            answer = requests.request(self.command, upstream + self.path, data=data, headers=sent, timeout=60)
            if "/upload/" in self.path:
                generations.append(answer.json()["generation"])
                if len(generations) == 1:
                    self._lose()
                    return
            self.send_response(answer.status_code)
            for key, value in answer.headers.items():
                if key.lower() not in HOP:
                    self.send_header(key, value)
            self._end(answer.content)

        do_GET = do_POST = do_PUT = handle_one

        def _lose(self) -> None:
            if status is None:
                self.close_connection = True
                return
            self.send_response(status)
            self._end(b"")

        def _end(self, data: bytes) -> None:
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", generations
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [503, None])
def test_an_upload_whose_reply_was_lost_is_one_run(user: User, status: int | None) -> None:
    """Google's client repeats the upload, so the object has two generations with the same bytes."""
    name, bucket = f"specs/lost-{time.time_ns()}.json", user.settings.specs_bucket
    spec = json.dumps(user.spec("hang"))
    with run_events(user) as pull, losing(user.info.environment["STORAGE_EMULATOR_HOST"], status) as (address, uploads):
        options = {"api_endpoint": address}
        client = storage.Client(project="p", credentials=AnonymousCredentials(), client_options=options)
        client.bucket(bucket).blob(name).upload_from_string(spec, content_type="application/json")
        assert len(set(uploads)) == 2, "the client repeats the upload"
        ids = {names.run_id_of_object(bucket, name, generation) for generation in uploads}
        seen: list[str] = []

        def is_answered() -> bool:
            seen.extend(event["notice"] or "" for _, event in pull())
            return any(notice.removeprefix("joined-") in ids for notice in seen)

        user.until(is_answered)
    found = {user.store.record(run).run for run in ids}
    [run] = found
    assert [each for each in ids if user.store.exists(each)] == [run]
    user.publish("dropforge-operations", json.dumps({"cancel": run}).encode())
    record = user.wait(run)
    assert record.state is RunState.CANCELLED
    assert record.ended_by.startswith("topic dropforge-operations message ")


def test_an_object_that_was_moved_is_named_as_the_cause(user: User) -> None:
    bucket, stem = clients.storage().bucket(user.settings.specs_bucket), f"specs/moved-{time.time_ns()}"
    run = user.drop(user.spec("hang"), f"{stem}.json")
    user.wait(run, "TRAINING")
    blob = bucket.blob(f"{stem}.json")
    bucket.copy_blob(blob, bucket, f"{stem}-b.json")
    copied = names.run_id_of_object(bucket.name, f"{stem}-b.json", bucket.get_blob(f"{stem}-b.json").generation)
    blob.delete()
    cause = f"the deletion of gs://{bucket.name}/{stem}.json, of which gs://{bucket.name}/{stem}-b.json is a copy"
    assert user.wait(run).ended_by == cause
    user.publish("dropforge-operations", json.dumps({"cancel": copied}).encode())
    assert user.wait(copied).state is RunState.CANCELLED
