"""A lean session sends what `requests` sends, and answers and fails as `requests` does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests
from google.auth.credentials import Credentials
from tests.patience import PATIENCE_SECONDS

from dropforge.cloud.sessions import GoogleSession, LeanSession, loopback_session, session_with


class Echo(BaseHTTPRequestHandler):
    """Answers with the request; /moved redirects to /here; /broken closes the connection; /401 refuses."""

    protocol_version = "HTTP/1.1"
    connections: set[Any] = set()

    def answer(self) -> None:
        self.connections.add(self.client_address)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/broken":
            self.close_connection = True
            return
        status = {"/moved": 302, "/kept": 308, "/401": 401, "/gone": 404}.get(self.path.split("?")[0], 200)
        headers = {name.lower(): value for name, value in self.headers.items() if name != "User-Agent"}
        echo = {"method": self.command, "path": self.path, "headers": headers, "body": body.decode("latin-1")}
        content = json.dumps(echo).encode()
        self.send_response(status)
        if status in (302, 308):
            self.send_header("Location", "/here")
        self.send_header("Set-Cookie", "seen=1")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Echo.connections = set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/o/a%2Fb?alt=media&x=%C3%A9", {"headers": {"accept-encoding": "gzip", "X-Own": "1"}}),
    ("get", "/with/params", {"params": [("$alt", "json;enum-encoding=int"), ("a", "b c&d"), ("a", "2")]}),
    ("GET", "/dict", {"params": {"a": 1, "b": None}}),
    ("GET", "/odd path/\u00e9?q=a b", {}),
    ("GET", "/a/../b#fragment", {}),
    ("HEAD", "/head", {}),
    ("POST", "/text", {"data": "text \u00e9", "headers": {"Content-Type": "text/plain"}}),
    ("POST", "/bytes", {"data": b"\x00\xff" * 1000}),
    ("POST", "/empty", {"data": b""}),
    ("POST", "/none", {}),
    ("DELETE", "/none", {}),
    ("PUT", "/form", {"data": {"a": "1"}}),
    ("POST", "/json", {"json": {"a": ["\u00e9", None]}}),
    ("POST", "/generator", {"data": iter([b"one", b"two"])}),
    ("GET", "/moved", {}),
    ("GET", "/moved", {"allow_redirects": False}),
    ("POST", "/kept", {"data": b"again"}),
    ("GET", "/gone", {}),
    ("GET", "/stream", {"stream": True}),
    ("GET", "/cookies", {"cookies": {"a": "b"}}),
]


@pytest.mark.parametrize(("method", "path", "options"), REQUESTS)
def test_a_request_is_the_one_of_requests(url: str, method: str, path: str, options: dict[str, Any]) -> None:
    def seen(session: requests.Session) -> tuple[object, ...]:
        copied = {**options, "data": iter([b"one", b"two"])} if path == "/generator" else options
        answer = session.request(method, url + path, timeout=PATIENCE_SECONDS, **copied)
        echo = json.loads(answer.content) if answer.content else None
        return answer.status_code, echo, answer.headers["content-length"], answer.reason, answer.encoding

    expected = seen(requests.Session())
    assert seen(LeanSession()) == expected
    assert seen(loopback_session()) == expected


@pytest.mark.parametrize("verb", ["get", "post", "put", "patch", "delete", "head", "options"])
def test_the_verbs_of_a_session_work(url: str, verb: str) -> None:
    assert getattr(LeanSession(), verb)(f"{url}/x", timeout=PATIENCE_SECONDS).status_code == (
        501 if verb == "options" else 200
    )


def test_a_session_keeps_its_connection_and_no_cookie(url: str) -> None:
    session = session_with("secret")
    answers = [session.get(f"{url}/{number}", timeout=PATIENCE_SECONDS).json() for number in range(3)]
    assert len(Echo.connections) == 1
    assert answers[2]["headers"]["authorization"] == "Bearer secret"
    assert "cookie" not in answers[2]["headers"]


def test_failures_are_those_of_requests(url: str) -> None:
    with pytest.raises(requests.ConnectionError):
        LeanSession().get(f"{url}/broken", timeout=PATIENCE_SECONDS)
    with pytest.raises(requests.ConnectionError):
        LeanSession().get("http://127.0.0.1:1/", timeout=PATIENCE_SECONDS)
    with pytest.raises(requests.exceptions.MissingSchema):
        LeanSession().get("no-scheme", timeout=PATIENCE_SECONDS)


def test_the_environment_is_read_once_for_a_host(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment counts, except for a loopback session."""
    monkeypatch.setenv("http_proxy", url)
    monkeypatch.delenv("no_proxy", raising=False)
    session = LeanSession()
    assert (
        session.get("http://storage.invalid/b", timeout=PATIENCE_SECONDS).json()["path"] == "http://storage.invalid/b"
    )
    monkeypatch.delenv("http_proxy")
    assert (
        session.get("http://storage.invalid/c", timeout=PATIENCE_SECONDS).json()["path"] == "http://storage.invalid/c"
    )
    with pytest.raises(requests.ConnectionError):
        loopback_session().get("http://storage.invalid/", timeout=PATIENCE_SECONDS)


class Token(Credentials):
    """Credentials whose token is new after each refresh."""

    refreshed = 0

    def refresh(self, _: object) -> None:
        self.refreshed += 1
        self.token = f"token-{self.refreshed}"


def test_a_google_session_sends_its_token_and_renews_a_refused_token(url: str) -> None:
    token = Token()
    session = GoogleSession(token)  # type: ignore[call-arg]
    for _ in range(2):
        answer = session.request("GET", f"{url}/x", timeout=PATIENCE_SECONDS)
        assert answer.json()["headers"]["authorization"] == "Bearer token-1"
    session.request("GET", f"{url}/401", timeout=PATIENCE_SECONDS)
    assert token.refreshed == 3  # AuthorizedSession tries twice
