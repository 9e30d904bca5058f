"""Gives the libraries with which MaxText reads and writes checkpoints the token of the run.

Orbax uses TensorStore and, by etils, gcsfs. TensorStore takes its token from a metadata server, at the address in
GCE_METADATA_ROOT (measured with 0.1.84: tests/stack/test_ray.py). gcsfs takes the credentials themselves.
"""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dropforge.cloud.clients import Clients

ROOT_VARIABLE = "GCE_METADATA_ROOT"
STATIC_VARIABLE = "GOOGLE_AUTH_TOKEN_FOR_TESTING"  # TensorStore prefers a fixed token, which ends after an hour
ACCOUNT = "/computeMetadata/v1/instance/service-accounts/"
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


def lend(clients: Clients) -> None:
    """Let TensorStore and gcsfs in this process use the run's token. Does nothing where the account has the access.

    Call it before either opens a bucket.
    """
    credentials = clients.run_credentials()
    if credentials is None:
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(clients.run_token))
    threading.Thread(target=server.serve_forever, name="bucket-tokens", daemon=True).start()
    os.environ.pop(STATIC_VARIABLE, None)
    os.environ[ROOT_VARIABLE] = f"127.0.0.1:{server.server_port}"
    import fsspec

    fsspec.config.conf["gcs"] = {**fsspec.config.conf.get("gcs", {}), "token": credentials}


def _handler(token: Any) -> type[BaseHTTPRequestHandler]:
    """The part of a metadata server that TensorStore reads. `token` returns a token and its seconds to live."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if self.headers.get("Metadata-Flavor") != "Google" or not path.startswith(ACCOUNT):
                return self.send_error(404)
            answer: dict[str, Any] = {"email": "run", "scopes": [SCOPE]}
            if path.endswith("/token"):
                value, seconds = token()
                answer = {"access_token": value, "expires_in": seconds, "token_type": "Bearer"}
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Nothing: the log is the run's."""

    return Handler
