"""A small HTTP/1.1 client for plain `http://`.

The services of a local stack listen on loopback, where the HTTP client takes most of a step's time; aiohttp takes twice
as long. This client does keep-alive, Content-Length and chunked bodies, gzip, redirects and time-outs. aiohttp does
`https://`.
"""

from __future__ import annotations

import asyncio
import re
import urllib.parse
import zlib
from collections import deque
from dataclasses import replace
from functools import lru_cache
from typing import Final

from ..interpreter.http_requests import IDEMPOTENT
from ..limits import Limits
from .aiohttp_transport import AiohttpTransport
from .http import HttpRequest, HttpResponse, connection_broke, connection_failed, join_headers, timeout_error

MAX_HEAD: Final = 256 * 1024
MAX_REDIRECTS: Final = 10
IDLE_SECONDS: Final = 1.0  # gunicorn closes after 2 s idle; a POST that meets the close must not be sent again
_HEX = re.compile(rb"[0-9A-Fa-f]+")


class PooledTransport:
    """The default transport of an engine: this module's client for `http://`, aiohttp for `https://`."""

    def __init__(self, response_bytes: int = Limits().response_bytes) -> None:
        self._response_bytes = response_bytes
        self._tls = AiohttpTransport(response_bytes)
        self._idle: dict[tuple[str, int], deque[_Connection]] = {}

    async def send(self, request: HttpRequest) -> HttpResponse:
        if not request.url.startswith("http://"):
            return await self._tls.send(request)
        try:
            async with asyncio.timeout(request.timeout):
                return await self._follow(request)
        except TimeoutError as error:
            raise timeout_error(request) from error

    async def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()
        await self._tls.close()

    async def _follow(self, request: HttpRequest) -> HttpResponse:
        for _ in range(MAX_REDIRECTS):
            response = await self._once(request)
            location = response.headers.get("Location")
            if response.status not in (301, 302, 303, 307, 308) or location is None:
                return response
            request = _redirected(request, response.status, location)
            if not request.url.startswith("http://"):
                return await self._tls.send(request)
        raise connection_broke(request, f"more than {MAX_REDIRECTS} redirects")

    async def _once(self, request: HttpRequest) -> HttpResponse:
        host, port, target = _address(request.url)
        connection, is_used = await self._connect(request, host, port)
        try:
            response = await connection.exchange(_head(request, host, port, target), request)
        except _Closed as error:
            if not (is_used and error.is_untouched and request.method in IDEMPOTENT):
                raise connection_broke(request, error) from error
            connection, _ = await self._connect(request, host, port, fresh=True)  # the server closed the idle one
            try:
                response = await connection.exchange(_head(request, host, port, target), request)
            except _Closed as again:
                raise connection_broke(request, again) from again
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.setdefault((host, port), deque()).append(connection)
        else:
            connection.close()
        if not response.body or "Content-Encoding" not in response.headers:
            return response
        try:
            return replace(response, body=_decoded(response, self._response_bytes))
        except zlib.error as error:
            raise connection_broke(
                request, f"its body is not {response.headers['Content-Encoding']}: {error}"
            ) from error

    async def _connect(
        self, request: HttpRequest, host: str, port: int, *, fresh: bool = False
    ) -> tuple[_Connection, bool]:
        """A connection, and whether an earlier request used it."""
        loop = asyncio.get_running_loop()
        idle = self._idle.get((host, port))
        while idle and not fresh:
            connection = idle.pop()
            if connection.is_reusable and loop.time() - connection.idle_since < IDLE_SECONDS:
                return connection, True
            connection.close()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self._response_bytes), host, port)
        except (OSError, UnicodeError) as error:
            raise connection_failed(request, error) from error
        return connection, False


class _Closed(Exception):
    """The connection ended before the response was complete; `is_untouched` if no byte of the response arrived."""

    def __init__(self, reason: str, *, is_untouched: bool) -> None:
        super().__init__(reason)
        self.is_untouched = is_untouched


class _Connection(asyncio.Protocol):
    """A connection; does a single exchange at a time."""

    def __init__(self, response_bytes: int) -> None:
        self.idle_since = 0.0
        self.is_reusable = True
        self._response_bytes = response_bytes
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[HttpResponse] | None = None
        self._buffer = bytearray()
        self._method = ""
        self._head: tuple[int, dict[str, str]] | None = None
        self._body_at = 0

    async def exchange(self, head: bytes, request: HttpRequest) -> HttpResponse:
        if self._transport is None or self._transport.is_closing():
            raise _Closed("the server closed the connection", is_untouched=True)
        self._method, self._head, self._body_at = request.method, None, 0
        self._buffer.clear()
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(head + request.body if request.body else head)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            self.close()  # no request is open, so the server broke the protocol
            return
        self._buffer += data
        try:
            response = self._parse(at_end=False)
        except ValueError as error:
            self._fail(f"not an HTTP response: {error}")
            return
        if response is not None:
            self._finish(response)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        if self._waiter is None or self._waiter.done():
            return
        try:
            response = self._parse(at_end=True)
        except ValueError:
            response = None
        if response is not None:
            self._finish(response)
        else:
            self._fail(str(error) if error else "the server closed the connection")

    def _finish(self, response: HttpResponse) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(response)

    def _fail(self, reason: str) -> None:
        self.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(_Closed(reason, is_untouched=not self._buffer))

    def _parse(self, *, at_end: bool) -> HttpResponse | None:
        """The response, or None while it is incomplete. Raises ValueError for bytes that are not HTTP."""
        if self._head is None and not self._parse_head():
            return None
        assert self._head is not None
        status, headers = self._head
        body = self._buffer
        start = self._body_at
        if self._method == "HEAD" or status in (204, 304):
            return HttpResponse(status, headers, b"")
        if "chunked" in headers.get("Transfer-Encoding", "").lower():
            chunks = _dechunk(body, start, self._response_bytes)
            return None if chunks is None else HttpResponse(status, headers, self._bounded(chunks))
        if (length := headers.get("Content-Length")) is not None:
            if not (length.isascii() and length.isdigit()):  # int() takes "-1", "+1" and "1_0", too
                raise ValueError(f"its Content-Length is {length[:20]!r}; expected digits")
            size = int(length)
            if size > self._response_bytes:
                size = self._response_bytes + 1  # a byte over the limit makes the caller refuse the response
                self.is_reusable = False
            if len(body) - start < size:
                return None
            return HttpResponse(status, headers, bytes(body[start : start + size]))
        self.is_reusable = False  # without a length the body ends with the connection
        if at_end or len(body) - start > self._response_bytes:
            return HttpResponse(status, headers, self._bounded(bytes(body[start:])))
        return None

    def _bounded(self, body: bytes) -> bytes:
        if len(body) > self._response_bytes:
            self.is_reusable = False
        return body[: self._response_bytes + 1]

    def _parse_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise ValueError("the head is too long")
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not code.isdigit():
            raise ValueError(f"unexpected {lines[0][:60]!r}")
        if code.startswith("1"):  # an informational response; the final response follows
            del self._buffer[: end + 4]
            return self._parse_head()
        pairs = (line.partition(":") for line in lines[1:])
        headers = join_headers((name.strip(), value.strip()) for name, _, value in pairs)
        if "Content-Length" in headers and "Transfer-Encoding" in headers:  # where does the body end?
            raise ValueError("it has both Content-Length and Transfer-Encoding")
        keep = headers.get("Connection", "").lower()
        if "close" in keep or (version == "HTTP/1.0" and "keep-alive" not in keep):
            self.is_reusable = False
        self._head, self._body_at = (int(code), headers), end + 4
        return True


def _dechunk(buffer: bytearray, at: int, limit: int) -> bytes | None:
    """A chunked body if it is complete or over the limit, else None. Raises ValueError for a size that is no number."""
    body = bytearray()
    while True:
        line = buffer.find(b"\r\n", at)
        if line < 0:
            return None
        digits = bytes(buffer[at:line]).split(b";")[0].rstrip()
        if not _HEX.fullmatch(digits):
            raise ValueError(f"the size of a chunk is {digits[:20]!r}; expected hexadecimal digits")
        size = int(digits, 16)
        at = line + 2
        if size == 0:  # trailers, then an empty line
            return bytes(body) if buffer.find(b"\r\n\r\n", line) == line or buffer.find(b"\r\n\r\n", at) >= 0 else None
        if len(buffer) < at + size + 2:
            return None
        body += buffer[at : at + size]
        at += size + 2
        if len(body) > limit:
            return bytes(body)


def _decoded(response: HttpResponse, limit: int) -> bytes:
    """The body without gzip or deflate, which some servers use unasked; at most `limit` bytes and one more."""
    encoding = response.headers["Content-Encoding"].strip().lower()
    if encoding not in ("gzip", "x-gzip", "deflate") or len(response.body) > limit:
        return response.body
    rest, decoded = response.body, b""
    while rest and len(decoded) <= limit:  # gzip may have several members
        is_bare = encoding == "deflate" and rest[0] & 15 != 8  # without zlib's header
        member = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else zlib.MAX_WBITS | 32)
        decoded += member.decompress(rest, limit + 1 - len(decoded))
        if not member.eof and len(decoded) <= limit:
            raise zlib.error("it is incomplete")
        rest = member.unused_data
    return decoded


@lru_cache(1024)
def _address(url: str) -> tuple[str, int, str]:
    """Host, port and request target of a URL."""
    parts = urllib.parse.urlsplit(url)
    target = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    if parts.query:
        target += "?" + urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    return parts.hostname or "", parts.port or 80, target


def _head(request: HttpRequest, host: str, port: int, target: str) -> bytes:
    given = {name.lower() for name in request.headers}
    lines = [f"{request.method} {target} HTTP/1.1"]
    if "host" not in given:
        shown = f"[{host}]" if ":" in host else host
        lines.append(f"Host: {shown}" if port == 80 else f"Host: {shown}:{port}")
    if "accept" not in given:
        lines.append("Accept: */*")
    lines += [f"{name}: {value}" for name, value in request.headers.items() if name.lower() != "content-length"]
    if request.body is not None or request.method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {len(request.body or b'')}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "replace")


def _redirected(request: HttpRequest, status: int, location: str) -> HttpRequest:
    """The request that follows a redirect. It carries no token or cookie to another host."""
    url = urllib.parse.urljoin(request.url, location)
    headers = dict(request.headers)
    if urllib.parse.urlsplit(url).netloc != urllib.parse.urlsplit(request.url).netloc:
        headers = {
            name: value for name, value in headers.items() if name.lower() not in ("authorization", "cookie", "host")
        }
    if status in (307, 308) or request.method in ("GET", "HEAD"):
        return replace(request, url=url, headers=headers)
    headers = {name: value for name, value in headers.items() if name.lower() != "content-type"}
    return replace(request, method="GET", url=url, headers=headers, body=None)
