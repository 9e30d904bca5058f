"""A cluster's own certificate authority, as in GKE: kubectl sends tokens over TLS only and verifies the server."""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass

import trustme

from dropforge_local.base.ports import HOST


@dataclass(frozen=True)
class Certificates:
    """PEM texts: the authority that clients trust, and the server's certificate with its key."""

    authority: str
    server: str


def make_certificates(name: str) -> Certificates:
    """A new authority, whose key is discarded, and one certificate for 127.0.0.1 and localhost."""
    authority = trustme.CA(organization_name=f"{name[-40:]}-ca")
    server = authority.issue_cert(HOST, "localhost", common_name="kube-apiserver")
    return Certificates(authority.cert_pem.bytes().decode(), server.private_key_and_cert_chain_pem.bytes().decode())


def server_context(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.NamedTemporaryFile(
        "w", suffix=".pem"
    ) as file:  # ssl reads only files; other users cannot read this file
        file.write(certificates.server)
        file.flush()
        context.load_cert_chain(file.name)
    return context
