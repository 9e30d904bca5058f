"""Connections to addresses that a spec or a secret names: to the internet only, and for a short time.

A name could resolve to a public address when it is checked and to a private one when it is used. So a name is resolved
once, every address of it is checked, and the connection goes to a checked address.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from threading import Timer
from time import monotonic
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from dropforge.base.redact import cut

from .channel import Failure

LIMIT_SECONDS = 10.0
_READ_BYTES = 400  # of the answer
_TRIED = 3  # addresses of a name
_TLS_PORTS = {"https": 443, "smtps": 465, "smtp+starttls": 587}
# The only part of IPv6 that has the internet's addresses: IANA's registry "IPv6 Global Unicast Address Assignments".
_INTERNET6 = IPv6Network("2000::/3")
# The `is_global` of Python 3.11 is true for these, too: 6to4, whose addresses lead to another address (RFC 3056, 7526),
# and addresses for documentation (RFC 9637).
_NOBODYS = IPv6Network("2002::/16"), IPv4Network("192.88.99.0/24"), IPv6Network("3fff::/20")


class Refused(Exception):
    """An address to which dropforge does not connect. The text says why, and has no part of the address."""


class Server(NamedTuple):
    """Where a URL leads."""

    scheme: str
    host: str
    port: int
    is_allowed: bool  # the emulator's own address: it need not be on the internet


def server_of(parts: SplitResult, schemes: tuple[str, ...], emulator: str = "") -> Server:
    """The server of a URL with one of these schemes. Raises Refused.

    `emulator` is host:port. A URL with this address may have the scheme without TLS (http, smtp).
    """
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:  # the text of the error repeats the port
        raise Refused("is not a URL with a valid port") from None
    allowed = bool(emulator) and f"{host}:{port}" == emulator
    plain = {scheme[:4] for scheme in schemes} if allowed else set()
    if parts.scheme not in {*schemes, *plain} or not host or not host.isascii():
        raise Refused(f"is not a URL that begins with {' or '.join(f'{scheme}://' for scheme in schemes)}")
    return Server(parts.scheme, host, port or _TLS_PORTS[parts.scheme], allowed)


@contextmanager
def dialled(server: Server, limit: float = LIMIT_SECONDS) -> Iterator[socket.socket]:
    """A connection to a server, which breaks `limit` seconds after the call. Raises Refused and OSError."""
    began = monotonic()
    connection = _connect(server, limit)
    guard = connection.dup()  # TLS takes the first socket over
    timer = Timer(max(0.0, limit - (monotonic() - began)), _break, [guard])
    timer.daemon = True
    timer.start()
    try:
        yield connection
    finally:
        timer.cancel()
        connection.close()
        guard.close()


def tls_context() -> ssl.SSLContext:
    """Trusts the authorities of the system, and those of requests: the functions' image may have none."""
    from requests.utils import DEFAULT_CA_BUNDLE_PATH

    context = ssl.create_default_context()
    context.load_verify_locations(DEFAULT_CA_BUNDLE_PATH)
    return context


def post(
    url: str, body: bytes, headers: dict[str, str], place: str, emulator: str = "", limit: float = LIMIT_SECONDS
) -> Failure | None:
    """POST to an https URL without following redirects; None if the answer is 2xx. Never raises.

    `place` says in errors whose URL it is: the URL itself may be a secret. `emulator` is host:port.
    """
    try:
        parts = urlsplit(url)
        server = server_of(parts, ("https",), emulator)
        status, may_pass, answer = _exchange(server, _target(parts), body, headers, limit)
    except Refused as refused:
        return Failure(f"{place}: its address {refused}", may_pass=False)
    except ssl.SSLCertVerificationError as error:
        return Failure(f"{place}: the certificate is not valid: {cut(error.verify_message, 100)}", may_pass=False)
    except (ValueError, HTTPException) as error:  # their texts may repeat the URL
        return Failure(f"{place}: the exchange failed: {type(error).__name__}", isinstance(error, HTTPException))
    except OSError as error:
        return Failure(f"{place}: the server could not be reached: {type(error).__name__}", may_pass=True)
    if 200 <= status < 300:
        return None
    note = "; redirects are not followed" if 300 <= status < 400 else ""
    return Failure(f"{place}: the server answered {status} {cut(answer, 100)!r}{note}", may_pass)


def _may_pass(response: HTTPResponse) -> bool:
    """Whether the same request may be accepted later. GitHub's rate limit is a 403 with one of these headers."""
    is_limited = response.getheader("Retry-After") is not None or response.getheader("X-RateLimit-Remaining") == "0"
    return response.status in (408, 429) or response.status >= 500 or (response.status == 403 and is_limited)


def _target(parts: SplitResult) -> str:
    target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    if not target.isascii() or not target.isprintable() or " " in target:
        raise Refused("has characters that a URL does not have")
    return target


def _exchange(server: Server, target: str, body: bytes, headers: dict[str, str], limit: float) -> tuple[int, bool, str]:
    with dialled(server, limit) as connection:
        http = HTTPConnection(server.host, server.port)
        is_tls = server.scheme == "https"
        http.sock = tls_context().wrap_socket(connection, server_hostname=server.host) if is_tls else connection
        http.default_port = 443 if is_tls else 80  # else the header Host names the port
        try:
            http.request("POST", target, body, {"User-Agent": "dropforge", **headers})
            response = http.getresponse()
            return response.status, _may_pass(response), response.read(_READ_BYTES).decode(errors="replace")
        finally:
            http.close()


def _connect(server: Server, limit: float) -> socket.socket:
    try:
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise Refused("has a name that is no host's") from None
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            raise
        raise Refused("has a name that does not exist") from None
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    if not server.is_allowed and not all(map(is_public, addresses)):
        raise Refused("is not on the internet: private, local and reserved addresses are refused")
    problem: OSError = OSError("no address")
    tried = addresses[:_TRIED]
    for address in tried:
        try:
            connection = socket.create_connection((address, server.port), timeout=limit / len(tried))
        except OSError as error:
            problem = error
        else:
            connection.settimeout(limit)
            return connection
    raise problem


def is_public(address: str) -> bool:
    """Whether an IP address is on the internet: no private, loopback, link-local, shared or reserved address."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped:
            return is_public(str(found.ipv4_mapped))
        if found not in _INTERNET6:
            return False
    return found.is_global and not found.is_multicast and not any(found in network for network in _NOBODYS)


def _break(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it is closed
