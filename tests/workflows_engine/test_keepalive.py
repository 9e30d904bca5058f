"""The HTTP client against servers that use all of HTTP/1.1, and against servers that break it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import zlib

import pytest
from tests.patience import PATIENCE_SECONDS

from workflows_engine import HttpRequest, HttpResponse, PooledTransport, WorkflowError


def exchange(
    answers: list[bytes],
    method: str = "GET",
    *,
    times: int = 1,
    close: bool = False,
    limit: int = 1000,
    path: str = "/x",
) -> tuple[list[HttpResponse], list[bytes], int]:
    """(responses, heads that the server read, number of connections) of requests that get raw `answers` in order."""

    async def run() -> tuple[list[HttpResponse], list[bytes], int]:
        read: list[bytes] = []
        connections = 0
        serving: list[asyncio.Task[None] | None] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            serving.append(asyncio.current_task())
            try:
                while answers:
                    read.append(await reader.readuntil(b"\r\n\r\n"))
                    answer = answers.pop(0)
                    for at in range(0, len(answer), 7):  # in pieces of 7 bytes
                        writer.write(answer[at : at + 7])
                        await writer.drain()
                        await asyncio.sleep(0)
                    if close:
                        break
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        transport = PooledTransport(limit)
        try:
            request = HttpRequest(
                method, f"http://127.0.0.1:{port}{path}", {"Idempotency-Key": "k"}, timeout=PATIENCE_SECONDS
            )
            return [await transport.send(request) for _ in range(times)], read, connections
        finally:
            await transport.close()
            server.close()
            _, open_ = await asyncio.wait([task for task in serving if task is not None], timeout=PATIENCE_SECONDS)
            assert not open_, "the client left a connection open"

    return asyncio.run(run())


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nX-A: 1\r\nx-a: 2\r\n\r\nok"


def test_connections_are_kept() -> None:
    responses, read, connections = exchange([OK, OK, OK], times=3)
    assert [response.body for response in responses] == [b"ok"] * 3
    assert responses[0].headers == {"Content-Length": "2", "X-A": "1, 2"}
    assert (len(read), connections) == (3, 1)


@pytest.mark.parametrize(
    ("answer", "method", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", "GET", b"abcde"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nTrailer: x\r\n\r\n", "GET", b"a"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", "POST", b"x"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "DELETE", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", "HEAD", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "GET", b""),
    ],
)
def test_bodies(answer: bytes, method: str, body: bytes) -> None:
    responses, _, connections = exchange([answer, answer], method, times=2)
    assert [response.body for response in responses] == [body, body]
    assert connections == 1


def encoded(encoding: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


RAW_DEFLATE = zlib.compressobj(wbits=-zlib.MAX_WBITS)


@pytest.mark.parametrize(
    ("encoding", "sent", "body"),
    [
        ("gzip", gzip.compress(b"text", mtime=0), b"text"),
        ("GZIP", gzip.compress(b"te", mtime=0) + gzip.compress(b"xt", mtime=0), b"text"),
        ("deflate", zlib.compress(b"text"), b"text"),
        ("deflate", RAW_DEFLATE.compress(b"text") + RAW_DEFLATE.flush(), b"text"),
        ("identity", b"text", b"text"),
        ("gzip", gzip.compress(b"x" * 100_000, mtime=0), b"x" * 1001),  # a byte over the limit, and no more
    ],
)
def test_a_body_that_is_compressed_unasked_is_decoded(encoding: str, sent: bytes, body: bytes) -> None:
    (response, again), (head, _), connections = exchange([encoded(encoding, sent)] * 2, times=2, limit=1000)
    assert response.body == again.body == body
    assert b"Accept-Encoding" not in head
    assert connections == 1


@pytest.mark.parametrize(
    "sent", [gzip.compress(b"text", mtime=0)[:-1], b"not gzip", gzip.compress(b"text", mtime=0) + b"more"]
)
def test_a_broken_gzip_is_a_connection_error(sent: bytes) -> None:
    with pytest.raises(WorkflowError, match="its body is not gzip") as caught:
        exchange([encoded("gzip", sent)])
    assert caught.value.value["tags"] == ["ConnectionError"]


def test_a_body_may_end_with_the_connection() -> None:
    responses, _, connections = exchange([b"HTTP/1.1 200 OK\r\n\r\nall of it"] * 2, times=2, close=True)
    assert [response.body for response in responses] == [b"all of it"] * 2
    assert connections == 2


def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    closing = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    assert exchange([closing, closing], times=2, close=True)[2] == 2
    assert exchange([OK, OK], times=2, close=True)[2] == 2  # without announcing it


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not an HTTP response"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not an HTTP response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "not an HTTP response"),
        *(
            (f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\nab".encode(), "its Content-Length is")
            for length in ("-2", "+2", "0_2", "²", "2, 2", "")  # int() accepts the first three
        ),
        *(
            (f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{size}\r\nab\r\n0\r\n\r\n".encode(), "a chunk")
            for size in ("-2", "-6", "+2", "0_2", "0x2", "")  # after -6, the same line would be read again, for ever
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "both Content-Length and Transfer-Encoding",
        ),
    ],
)
def test_a_malformed_response_is_a_connection_error(answer: bytes, message: str) -> None:
    with pytest.raises(WorkflowError) as caught:
        exchange([answer], "POST", close=True)
    assert caught.value.value["tags"] == ["ConnectionError"]
    assert message in caught.value.value["message"]


def test_the_connection_of_a_malformed_response_is_closed() -> None:
    with pytest.raises(WorkflowError, match="its Content-Length is '-1'"):
        exchange([b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", OK])


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\n" + b"x" * 4096 + b"\r\n0\r\n\r\n",
    ],
)
def test_a_body_over_the_limit_is_cut_after_the_limit(answer: bytes) -> None:
    ((response,), _, _) = exchange([answer], limit=100)
    assert len(response.body) == 101


@pytest.mark.parametrize(
    ("status", "method", "then"),
    [(301, "GET", "GET"), (302, "POST", "GET"), (303, "PUT", "GET"), (307, "POST", "POST"), (308, "PUT", "PUT")],
)
def test_redirects_are_followed(status: int, method: str, then: str) -> None:
    moved = f"HTTP/1.1 {status} Moved\r\nLocation: /there?a=b\r\nContent-Length: 0\r\n\r\n".encode()
    ((response,), read, _) = exchange([moved, OK], method)
    assert response.body == b"ok"
    assert read[1].startswith(f"{then} /there?a=b HTTP/1.1".encode())


def test_endless_redirects_are_an_error() -> None:
    moved = b"HTTP/1.1 302 Moved\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(WorkflowError, match="more than 10 redirects"):
        exchange([moved] * 20)


def test_requests_are_well_formed() -> None:
    _, (read,), _ = exchange([OK], "POST", path="/a b/ü?q=1 2&r=%20")
    head = read.decode()
    assert head.startswith("POST /a%20b/%C3%BC?q=1%202&r=%20 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "Content-Length: 0\r\n" in head
    assert "Idempotency-Key: k\r\n" in head


def test_a_silent_server_is_a_timeout() -> None:
    async def run() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            transport = PooledTransport()
            try:
                await transport.send(HttpRequest("GET", f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout=0.05))
            finally:
                await transport.close()

    with pytest.raises(WorkflowError, match=r"took longer than 0\.05 s"):
        asyncio.run(run())
