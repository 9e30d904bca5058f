"""Whole runs whose containers ask for access when it fails for the moment."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dropforge.run.record import RunState

from .conftest import NOOP_CONFIG, User
from .targets import PARTS
from .test_runs import assert_clean

pytestmark = pytest.mark.slow


class TokenService(ThreadingHTTPServer):
    """The Security Token Service, which fails every other time. `cloud` is host:port of the stack's own."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cloud = ""
        self.answered: list[int] = []


class _Handler(BaseHTTPRequestHandler):
    server: TokenService

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status, content = 503, b"Service Unavailable"
        if len(self.server.answered) % 2:
            cloud = http.client.HTTPConnection(self.server.cloud, timeout=60)
            cloud.request("POST", self.path, body, dict(self.headers))
            answer = cloud.getresponse()
            status, content = answer.status, answer.read()
            cloud.close()
        self.server.answered.append(status)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing: the test tells what was answered."""


@pytest.fixture
def tokens() -> Iterator[TokenService]:
    service = TokenService()
    thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield service
    service.shutdown()
    service.server_close()
    thread.join()


def test_a_run_outlives_a_first_answer_503_of_access(
    own_stack: Callable[[], User], tokens: TokenService, tmp_path: Path
) -> None:
    """On each target: `access` answers 503, because the Security Token Service does."""
    settings = {**NOOP_CONFIG.settings, "STS_EMULATOR_HOST": f"http://127.0.0.1:{tokens.server_port}"}
    replace(NOOP_CONFIG, settings=settings).save(tmp_path / "stack")
    user = own_stack()
    tokens.cloud = user.info.http.removeprefix("http://")
    for target, parts in PARTS.items():
        before = len(tokens.answered)
        run = user.drop(user.spec(target={"type": target, **parts}))
        record = user.wait(run)
        assert record.state is RunState.SUCCEEDED, (target, record.error)
        assert len(record.attempts) == 1
        assert tokens.answered[before] == 503
        assert_clean(user, run)
