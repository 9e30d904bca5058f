"""Identity-Aware Proxy for tests: keys that sign real assertions, and the server of their public halves."""

from __future__ import annotations

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from dropforge_console.iap import ISSUER

HOST = "console-123.us-central1.run.app"
AUDIENCE = "/projects/123/locations/us-central1/services/dropforge-console"


class Signer:
    """A P-256 key that signs as IAP does: a signature is r and s (RFC 7518, 3.4)."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.key_id = f"key-{id(self)}"

    @property
    def pem(self) -> str:
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return self._key.public_key().public_bytes(serialization.Encoding.PEM, form).decode()

    def assertion(self, key_id: str = "", **changes: Any) -> str:
        """An assertion about a viewer, or with these claims; None removes a claim."""
        now = int(time.time())
        claims = {"iss": ISSUER, "aud": AUDIENCE, "iat": now - 1, "exp": now + 600, "email": "vera@example.com"}
        claims = {name: value for name, value in (claims | changes).items() if value is not None}
        signed = signed_part({"alg": "ES256", "typ": "JWT", "kid": key_id or self.key_id}, claims)
        r, s = decode_dss_signature(self._key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{signed}.{encoded(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed_part(head: dict[str, Any], claims: dict[str, Any]) -> str:
    return ".".join(encoded(json.dumps(part).encode()) for part in (head, claims))


class KeyServer:
    """Serves public keys as www.gstatic.com does, and counts the requests."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.requests = 0
        self.is_up = True
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests += 1
                data = json.dumps(server.keys).encode()
                self.send_response(200 if server.is_up else 500)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                return

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/public_key"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
