"""No spec and no secret makes the control plane call an address that is not on the internet, or wait for long."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trustme

from dropforge.tell.channel import Failure
from dropforge.tell.outgoing import is_public, post

from ..patience import PATIENCE_SECONDS

PLACE = "the webhook of secret 'hook'"
PRIVATE = [
    "127.0.0.1", "127.8.9.1", "10.0.0.5", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0",
    "fd20:ce::254", "fc00::1", "ff02::1", "::ffff:10.0.0.5", "::ffff:169.254.169.254", "64:ff9b::a00:5",
    "64:ff9b:1::a00:5", "64:ff9b::808:808", "2002:a00:5::1", "2002:808:808::1", "2001:0:a00:5::1", "2001:db8::1",
    "::10.0.0.5", "::8.8.8.8",  # IPv4-compatible (RFC 4291, 2.5.5.1)
    "::ffff:0:10.0.0.5",  # IPv4-translated (RFC 2765)
    "fec0::1", "feff::1",  # site-local (RFC 3879)
    "100::1", "5f00::1", "200::1", "1fff::1", "4000::1", "8000::1", "fe00::1",  # nobody's
    "3fff::1", "192.0.2.9", "198.51.100.1", "203.0.113.1",  # for documentation (RFC 9637, 5737)
    "2001:2::1",  # for benchmarks (RFC 5180)
    "0.1.2.3", "192.0.0.170", "192.88.99.1", "100.127.255.255", "239.1.1.1", "255.255.255.254",
    "ff0e::1", "fdff::1", "::ffff:100.64.0.1", "::ffff:224.0.0.1",
]  # fmt: skip


@contextmanager
def server_with(answer: Callable[[socket.socket], None], context: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server on a free port that calls `answer` with each connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(connection, server_side=True) if context else connection as accepted:
                    answer(accepted)
            except OSError:
                continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def answering(text: bytes, heard: list[bytes] | None = None) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n{}" not in request:
            request += connection.recv(65536)
        if heard is not None:
            heard.append(request)
        connection.sendall(text)

    return answer


def posted(url: str, emulator: str = "") -> Failure | None:
    return post(url, b"{}", {}, PLACE, emulator)


def refused(url: str, emulator: str = "") -> Failure:
    failure = posted(url, emulator)
    assert failure
    assert PLACE in failure.problem
    assert "Canary" not in failure.problem
    return failure


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_inside_a_network_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8", "140.82.112.5", "100.128.0.1", "223.255.255.1", "2606:4700::1111", "2a00:1450:4001::200e",
        "2003::1", "2400:cb00::1", "::ffff:8.8.8.8",
    ],
)  # fmt: skip
def test_an_address_on_the_internet_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.1.2.3", "2130706433", "0x7f.1", "127.1", "0"]
)
def test_no_call_reaches_this_machine_or_a_private_network(host: str) -> None:
    calls: list[bytes] = []
    with server_with(answering(b"", calls)) as port:
        failure = refused(f"https://{host}:{port}/Canary")
    assert "not on the internet" in failure.problem
    assert (calls, failure.may_pass) == ([], False)


def test_a_name_with_one_private_address_is_refused_whatever_its_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(0, 0, 0, "", (address, 443)) for address in ("8.8.8.8", "10.0.0.5")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert "not on the internet" in refused("https://rebinding.example/Canary").problem


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to another address the second time is resolved once."""
    names, addresses = list[str](), list[str]()

    def resolve(host: str, port: int, **_: Any) -> Any:
        names.append(host)
        return [(0, 0, 0, "", ("8.8.8.8" if len(names) == 1 else "127.0.0.1", port))]

    def connect(address: tuple[str, int], timeout: float) -> Any:
        addresses.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    failure = refused("https://rebinding.example/Canary")
    assert (names, addresses, failure.may_pass) == (["rebinding.example"], ["8.8.8.8"], True)


@pytest.mark.parametrize(
    "url",
    [
        "", "Canary", "http://hooks.example.com/Canary", "ftp://Canary", "https://", "https:///Canary", "https://[Canary",
        "https://hooks.example.com:Canary/", "https://hooks.example.com:99999/Canary", "file:///etc/Canary",
        "https://ex\u00e4mple.com/Canary", "https://" + "a" * 70 + ".example/Canary",
    ],
)  # fmt: skip
def test_what_is_no_https_url_is_refused_without_its_text(url: str) -> None:
    assert not refused(url).may_pass


@pytest.mark.parametrize("path", ["Can ary\r\nX-Injected: y", "ä", "a b"])
def test_no_url_injects_a_header(path: str) -> None:
    heard: list[bytes] = []
    with server_with(answering(b"HTTP/1.1 200 OK\r\n\r\n", heard)) as port:
        posted(f"http://127.0.0.1:{port}/{path}", f"127.0.0.1:{port}")
    assert b"\r\nX-Injected" not in b"".join(heard)


def test_a_redirect_is_not_followed() -> None:
    with server_with(
        answering(b"HTTP/1.1 307 Go\r\nLocation: https://evil.example/\r\nContent-Length: 0\r\n\r\n")
    ) as port:
        failure = refused(f"http://127.0.0.1:{port}/", f"127.0.0.1:{port}")
    assert "answered 307" in failure.problem
    assert "redirects are not followed" in failure.problem
    assert not failure.may_pass


@pytest.mark.parametrize(
    ("headers", "may_pass"), [("", False), ("X-RateLimit-Remaining: 0\r\n", True), ("Retry-After: 60\r\n", True)]
)
def test_a_403_may_pass_if_it_is_a_rate_limit(headers: str, may_pass: bool) -> None:
    with server_with(answering(f"HTTP/1.1 403 No\r\n{headers}Content-Length: 0\r\n\r\n".encode())) as port:
        assert refused(f"http://127.0.0.1:{port}/", f"127.0.0.1:{port}").may_pass is may_pass


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 500 " + b"x" * 70_000])
def test_a_server_that_breaks_the_protocol_is_a_failure_that_may_pass(answer: bytes) -> None:
    with server_with(answering(answer)) as port:
        assert refused(f"http://127.0.0.1:{port}/", f"127.0.0.1:{port}").may_pass


def test_a_server_that_answers_a_byte_at_a_time_is_left() -> None:
    left = threading.Event()

    def drip(connection: socket.socket) -> None:
        """Send until the client has left; the time between two bytes is far below the limit."""
        connection.sendall(b"HTTP/1.1")
        try:
            while not left.wait(0.01):
                connection.sendall(b" ")
        except OSError:
            left.set()

    with server_with(drip) as port:
        failure = post(f"http://127.0.0.1:{port}/", b"{}", {}, PLACE, f"127.0.0.1:{port}", limit=0.3)
        assert left.wait(PATIENCE_SECONDS)
    assert failure
    assert failure.may_pass


def test_a_certificate_must_be_signed_by_a_known_authority_for_this_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    heard: list[bytes] = []
    with server_with(answering(b"HTTP/1.1 204 OK\r\n\r\n", heard), context) as port:
        url, emulator = f"https://localhost:{port}/hook?x=1", f"localhost:{port}"
        unknown = refused(url, emulator)
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert posted(url, emulator) is None
        other = refused(url.replace("localhost", "127.0.0.1"), emulator.replace("localhost", "127.0.0.1"))
    assert ("certificate is not valid" in unknown.problem, unknown.may_pass) == (True, False)
    assert ("certificate is not valid" in other.problem, other.may_pass) == (True, False)
    [request] = heard
    assert request.startswith(b"POST /hook?x=1 HTTP/1.1\r\n")
    assert f"Host: localhost:{port}\r\n".encode() in request
