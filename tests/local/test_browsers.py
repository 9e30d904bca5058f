"""A web page in the developer's browser reaches nothing of the local stack."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from dropforge_local.base.browsers import problem_of
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.ports import free_port
from dropforge_local.base.server import BackgroundServer, Server
from dropforge_local.emulators.secretmanager import SecretManagerEmulator
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.emulators.tpu.metadata import MetadataServer

SECRET = "projects/p/secrets/hf-token/versions/latest:access"
UPLOAD = "/upload/storage/v1/b/specs/o?uploadType=media&name=specs/evil.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("stack")

    def build() -> list[Any]:
        db, clock = Database(home / "state.db"), SystemClock()
        emulated = StorageEmulator(db, home / "blobs", clock)
        emulated.create_bucket("specs")
        secrets = SecretManagerEmulator(db, clock, "p")
        secrets.set_secret("hf-token", b"value")
        return [emulated, secrets]

    with BackgroundServer(build) as running:
        yield running


def send(port: int, method: str, path: str, headers: dict[str, str], body: str | None = None) -> tuple[int, str]:
    """Send a request as a browser does; a header `Host` replaces the one of the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "headers",
    [
        # A page of another site: a form or fetch(…, {mode: "no-cors"}), which browsers send without a preflight.
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"},
        {"Origin": "https://evil.example", "Content-Type": "text/plain"},  # a browser from before Sec-Fetch-Site
        {"Origin": "null", "Content-Type": "text/plain"},  # a sandboxed frame
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"},  # a page of another local server
        {"Origin": "http://localhost:1"},
        # DNS rebinding: the page's own name has become 127.0.0.1.
        {"Host": "evil.example"},
        {"Host": "evil.example:80", "Origin": "http://evil.example:80", "Sec-Fetch-Site": "same-origin"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost.evil.example"},
        {"Host": "169.254.169.254"},
        {"Host": ""},
        {"Host": "[::1"},
    ],
)
def test_a_web_page_changes_nothing_and_reads_nothing(server: Server, headers: dict[str, str]) -> None:
    assert send(server.http_port, "POST", UPLOAD, headers, '{"api_version": "dropforge/v1"}')[0] == 403
    status, text = send(server.http_port, "GET", f"/v1/{SECRET}", headers)
    assert (status, json.loads(text)["error"]["status"]) == (403, "PERMISSION_DENIED")
    assert send(server.http_port, "GET", "/storage/v1/b/specs/o/specs%2Fevil.json", {})[0] == 404


def test_a_preflight_allows_nothing(server: Server) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "PUT"}
    assert send(server.http_port, "OPTIONS", UPLOAD, asked)[0] == 403


def test_googles_client_and_a_page_of_the_server_itself_are_served(server: Server) -> None:
    for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
        client = storage.Client("p", AnonymousCredentials(), client_options={"api_endpoint": url})
        client.bucket("specs").blob("specs/good.json").upload_from_string("{}")
        client.close()
    own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    assert send(server.http_port, "GET", f"/v1/{SECRET}", own)[0] == 200
    assert problem_of({"Host": "[::1]:8080"}) is None
    assert problem_of({"Host": "127.4.5.6:8000", "Sec-Fetch-Site": "none"}) is None


class Metadata:
    """A machine's metadata server as a part of a server."""

    def __init__(self) -> None:
        self.port = free_port(range(24000, 30000), set())
        tree = {"instance": {"service-accounts": {"default": {"token": "secret"}}}}
        self.start, self.stop = (served := MetadataServer(self.port, lambda: tree)).start, served.stop

    def routes(self) -> list[Any]:
        return []

    def grpc_handlers(self) -> list[Any]:
        return []


def test_a_rebound_page_gets_no_token_from_a_metadata_server() -> None:
    """With DNS rebinding a page is of the same origin, so it may set Metadata-Flavor."""
    metadata = Metadata()
    path, headers = "/computeMetadata/v1/instance/service-accounts/default/token", {"Metadata-Flavor": "Google"}
    with BackgroundServer(lambda: [metadata]):
        assert send(metadata.port, "GET", path, headers) == (200, "secret")
        assert send(metadata.port, "GET", path, {**headers, "Host": "evil.example"})[0] == 403
