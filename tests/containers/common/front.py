"""A server between a container and its cloud: the metadata server, the function `access`, and Cloud Storage.

It answers as the cloud does, but for the requests that the test has chosen.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

# Faults besides an HTTP status: the connection is cut, the answer is lost after the work, or it comes after the test.
CUT, LOST, LATE = "cut", "lost", "late"
Fault = int | str


class Asked(NamedTuple):
    """A request: its number from 0, what is asked ("identity", "access" or "storage"), and its body."""

    number: int
    of: str
    body: bytes


class Front(ThreadingHTTPServer):
    """`fault` chooses what a request meets; None: the cloud's answer. A token lives for `token_seconds`."""

    daemon_threads = True

    def __init__(self, storage: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.storage = storage.removeprefix("http://")
        self.fault: Callable[[Asked], Fault | None] = lambda asked: None
        self.token_seconds = 3600
        self.asked: list[Asked] = []
        self.met: list[tuple[Asked, Fault]] = []
        self.spec: dict[str, Any] = {}
        self.ended = threading.Event()
        self._lock = threading.Lock()

    def note(self, of: str, body: bytes) -> Fault | None:
        with self._lock:
            asked = Asked(len(self.asked), of, body)
            self.asked.append(asked)
            fault = self.fault(asked)
            if fault is not None:
                self.met.append((asked, fault))
        return fault

    def count(self, of: str) -> int:
        return sum(asked.of == of for asked in self.asked)

    def first(self, of: str, *faults: Fault) -> None:
        """Let the first requests of a kind meet these faults."""
        left = list(faults)
        self.fault = lambda asked: left.pop(0) if asked.of == of and left else None

    def environment(self, bucket: str) -> dict[str, str]:
        """The environment of a container of a run."""
        address = f"127.0.0.1:{self.server_port}"
        return {
            "STORAGE_EMULATOR_HOST": f"http://{address}",
            "GCE_METADATA_HOST": address,
            "DROPFORGE_RUNS_BUCKET": bucket,
            "DROPFORGE_ACCESS_URL": f"http://{address}/access",
            "DROPFORGE_ACCESS_REQUEST": json.dumps({"run": "demo-0123456789ab", "proof": "5"}),
        }


@contextmanager
def front_of(storage: str) -> Iterator[Front]:
    """A front of the storage emulator at a URL."""
    front = Front(storage)
    thread = threading.Thread(target=front.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield front
    finally:
        front.ended.set()
        front.shutdown()
        front.server_close()
        thread.join()


def stop_this_process() -> None:
    """Send the signal with which the cloud ends a container."""
    os.kill(os.getpid(), signal.SIGTERM)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # small writes of their own would meet delayed acknowledgements: 40 ms a request
    server: Front

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        of = "identity" if "/identity" in self.path else "access" if self.path == "/access" else "storage"
        fault = self.server.note(of, body)
        if isinstance(fault, int):
            return self._answer(fault, {}, json.dumps({"error": {"code": fault, "message": "a fault"}}).encode())
        if fault == LATE:
            self.server.ended.wait()
        answer = self._of_cloud(of, body) if fault != CUT else None
        if fault is None and answer is not None:
            return self._answer(*answer)
        self.close_connection = True
        return None

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _serve

    def _of_cloud(self, of: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if of == "identity":
            return 200, {}, b"an-identity-token"
        if of == "access":
            token = f"token-{len(self.server.asked)}"
            granted = {"access_token": token, "expires_in": self.server.token_seconds, "spec": self.server.spec}
            return 200, {}, json.dumps(granted).encode()
        cloud = http.client.HTTPConnection(self.server.storage, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "authorization"}
            cloud.request(self.command, self.path, body, headers)  # the cloud does not know this server's tokens
            answer = cloud.getresponse()
            return answer.status, dict(answer.headers), answer.read()
        finally:
            cloud.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing: the test tells what was asked."""
