"""SPDY/3.1 as a server: the streams of a connection, which kubectl tunnels through a WebSocket to forward ports.

As in the library that Kubernetes uses (moby/spdystream), windows are ignored: a slow reader holds up its connection.
https://www.chromium.org/spdy/spdy-protocol/spdy-protocol-draft3-1/
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Awaitable, Callable

VERSION = 3
SYN_STREAM, SYN_REPLY, RST_STREAM, PING = 1, 2, 3, 6
FIN = 0x01
LARGEST_HEADERS = 64 * 1024
QUEUED_PIECES = 16

# Both sides know these bytes before the first header block (2.6.10.1): words, each after its length, and a text.
_WORDS = """
    options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow
    authorization cache-control connection content-base content-encoding content-language content-length
    content-location content-md5 content-range content-type date etag expect expires from host if-match
    if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma
    proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade
    user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url public set-cookie
    keep-alive origin
"""
_TEXT = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden"
    "404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable"
    "Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT"
    "chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/javascript,"
    "publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
DICTIONARY = b"".join(struct.pack(">I", len(word)) + word.replace("_", " ").encode() for word in _WORDS.split())
DICTIONARY += _TEXT.encode()


class SpdyError(Exception):
    """The client's bytes are not SPDY/3.1; the connection cannot continue."""


class Stream:
    """A stream that the client has opened. Its headers have names in lower case."""

    def __init__(self, session: Session, number: int, headers: dict[str, str]) -> None:
        self.headers = headers
        self.number = number
        self._session = session
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(QUEUED_PIECES)
        self._is_over = False

    async def read(self) -> bytes:
        """The next bytes of the client; b"" after the last."""
        return b"" if self._is_over and self._pieces.empty() else await self._pieces.get()

    async def write(self, data: bytes) -> None:
        await self._session.send_data(self.number, data)

    async def close(self) -> None:
        """Tell the client that no more bytes follow, and receive no more."""
        self._is_over = True
        while not self._pieces.empty():  # `feed` may wait for a place
            self._pieces.get_nowait()
        self._session.forget(self.number)
        await self._session.send_data(self.number, b"", FIN)

    async def feed(self, data: bytes, *, last: bool) -> None:
        """Receive bytes of the client."""
        if self._is_over:
            return
        if data:
            await self._pieces.put(data)
        if last:
            self._is_over = True
            await self._pieces.put(b"")


class Session:
    """A connection's frames. `send` sends bytes to the client; `opened` receives each new stream."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]], opened: Callable[[Stream], None]) -> None:
        self._send = send
        self._opened = opened
        self._buffer = b""
        self._streams: dict[int, Stream] = {}
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)
        self._deflate = zlib.compressobj(zdict=DICTIONARY)

    async def feed(self, data: bytes) -> None:
        """Receive the next bytes, which may be parts of frames. Raises SpdyError."""
        self._buffer += data
        while len(self._buffer) >= 8:
            first, second = struct.unpack(">II", self._buffer[:8])
            end = 8 + (second & 0xFFFFFF)
            if len(self._buffer) < end:
                return
            body, self._buffer = self._buffer[8:end], self._buffer[end:]
            await self._receive(first, second >> 24, body)

    def forget(self, number: int) -> None:
        """Ignore what the client sends on a stream from now on."""
        self._streams.pop(number, None)

    async def send_data(self, number: int, data: bytes, flags: int = 0) -> None:
        await self._send(struct.pack(">II", number, flags << 24 | len(data)) + data)

    async def _receive(self, first: int, flags: int, body: bytes) -> None:
        if not first >> 31:
            if stream := self._streams.get(first):
                await stream.feed(body, last=bool(flags & FIN))
            return
        version, kind = first >> 16 & 0x7FFF, first & 0xFFFF
        if version != VERSION:
            raise SpdyError(f"a frame has version {version}; expected {VERSION}")
        if kind == SYN_STREAM and len(body) >= 10:
            await self._open(body, flags)
        elif kind == RST_STREAM and len(body) == 8:
            if stream := self._streams.pop(struct.unpack(">I", body[:4])[0], None):
                await stream.feed(b"", last=True)
        elif kind == PING:
            await self._control(PING, body)
        # SETTINGS, HEADERS, WINDOW_UPDATE and GOAWAY change nothing here.

    async def _open(self, body: bytes, flags: int) -> None:
        (number,) = struct.unpack(">I", body[:4])
        stream = self._streams[number] = Stream(self, number, self._read_headers(body[10:]))
        nothing = self._deflate.compress(struct.pack(">I", 0)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        await self._control(SYN_REPLY, body[:4] + nothing)
        if flags & FIN:
            await stream.feed(b"", last=True)
        self._opened(stream)

    def _read_headers(self, block: bytes) -> dict[str, str]:
        try:
            data = self._inflate.decompress(block, LARGEST_HEADERS)
            if self._inflate.unconsumed_tail:
                raise SpdyError(f"the headers of a stream have more than {LARGEST_HEADERS} bytes")
            texts = _texts(data)
        except (zlib.error, struct.error, UnicodeDecodeError) as error:
            raise SpdyError(f"the headers of a stream are malformed: {error}") from error
        return dict(zip(texts[::2], texts[1::2], strict=True))

    async def _control(self, kind: int, body: bytes) -> None:
        await self._send(struct.pack(">II", 1 << 31 | VERSION << 16 | kind, len(body)) + body)


def _texts(block: bytes) -> list[str]:
    """The names and values of a header block, one after the other. Raises struct.error if the block is cut."""
    (count,) = struct.unpack_from(">I", block)
    texts, at = [], 4
    for _ in range(2 * count):
        (length,) = struct.unpack_from(">I", block, at)
        texts.append(block[at + 4 : at + 4 + length].decode())
        at += 4 + length
    return texts
