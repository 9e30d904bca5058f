"""A metadata server on loopback, by which other libraries of a container get the run's token (run_access.py).

Without it, they would ask Google's metadata server for a token of the container's account, which may not read the runs
bucket. https://cloud.google.com/compute/docs/metadata/predefined-metadata-keys
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .classify import client_errors
from .clients import Clients

HOST = "127.0.0.1"
PROJECT_VARIABLE = "DROPFORGE_PROJECT"
_ACCOUNT, _PROJECT = "/computeMetadata/v1/instance/service-accounts/", "/computeMetadata/v1/project/project-id"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


def metadata_server(clients: Clients) -> ThreadingHTTPServer:
    """A server at a free port of loopback. Any process of the container may ask: the token reaches only this run.

    `serve_forever` answers requests, each in a thread.
    """
    return ThreadingHTTPServer((HOST, 0), _handler(clients))


def _handler(clients: Clients) -> type[BaseHTTPRequestHandler]:
    """The part of a metadata server that TensorStore, google-cloud-cpp and google-auth read."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                answer = _answer(clients, self.path.partition("?")[0])
            except client_errors() as error:  # some clients ask again after a 503
                return self.send_error(503, explain=str(error))
            if self.headers.get("Metadata-Flavor") != "Google" or answer is None:
                return self.send_error(404)
            content_type = "application/json" if isinstance(answer, dict) else "application/text"
            content = (json.dumps(answer) if isinstance(answer, dict) else answer).encode()
            self.send_response(200)
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Nothing: the log is the run's."""

    return Handler


def _answer(clients: Clients, path: str) -> dict[str, Any] | str | None:
    """The answer at a path; None for a path that this server does not have."""
    if path == "/":  # google-auth asks whether there is a metadata server
        return "computeMetadata/\n"
    if path == _PROJECT:
        return clients.environment.get(PROJECT_VARIABLE)
    if not path.startswith(_ACCOUNT):
        return None
    if path.endswith("/token"):
        value, seconds = clients.run_token()
        return {"access_token": value, "expires_in": seconds, "token_type": "Bearer"}
    return {"email": "run", "scopes": [_SCOPE]}
