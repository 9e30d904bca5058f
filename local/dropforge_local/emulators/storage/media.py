"""Object bytes on the wire: hashes in headers, multipart/related bodies, byte ranges, and the download response."""

from __future__ import annotations

import base64
import binascii
import logging
import re
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, BinaryIO

from aiohttp import StreamReader, web

from ..kit.routing import Call
from .blobs import FLUSH_BYTES, BlobStore
from .errors import StorageError, invalid
from .models import Content, StoredObject
from .wire import MAX_JSON_BYTES, parse_json

log = logging.getLogger(__name__)

_HASH_LENGTHS = {"md5": 16, "crc32c": 4}
_RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{1,18})?|-(\d{1,18}))")
_BOUNDARY = re.compile(r"boundary=(?:\"([^\"]+)\"|'([^']+)'|([^;\s]+))", re.IGNORECASE)


def expected_hashes(headers: Mapping[str, str], resource: Mapping[str, Any]) -> dict[str, str]:
    """The MD5 and CRC32C that the caller sends in X-Goog-Hash, Content-MD5 and the object resource."""
    pairs: list[tuple[str, object]] = [
        ("md5", headers.get("Content-MD5")),
        ("md5", resource.get("md5Hash")),
        ("crc32c", resource.get("crc32c")),
    ]
    for part in headers.get("X-Goog-Hash", "").split(","):
        label, separator, digest = part.strip().partition("=")
        if separator:
            pairs.append((label, digest))
    return {name: _checked_hash(name, value) for name, value in pairs if value is not None}


def check_hashes(content: Content, expected: Mapping[str, str]) -> None:
    """Raise 400 if the received bytes do not have the hashes that the caller sent."""
    actual = {"md5": content.md5, "crc32c": content.crc32c}
    for name, value in expected.items():
        if actual[name] is not None and actual[name] != value:
            label = "MD5" if name == "md5" else "CRC32C"
            raise invalid(
                f"Provided {label} hash {value!r} doesn't match calculated {label} hash {actual[name]!r} "
                f"of the {content.size} bytes that arrived"
            )


class RelatedBody:
    """A multipart/related body of two parts: the small object resource, then the bytes, of any size."""

    def __init__(self, content: StreamReader, content_type: str) -> None:
        match = _BOUNDARY.search(content_type)
        if not match:
            raise invalid(f"Content-Type {content_type!r} names no boundary; expected multipart/related; boundary=...")
        self._boundary = b"--" + next(group for group in match.groups() if group).encode()
        self._content = content
        self._buffer = b""

    async def resource(self) -> dict[str, Any]:
        """The first part."""
        await self._read_through(self._boundary)
        # gcloud ends lines with LF alone, google-cloud-storage with CRLF.
        self._newline = b"\r\n" if await self._starts_with(b"\r\n") else b"\n"
        await self._read_through(self._newline)
        await self._headers()
        text = await self._read_through(self._newline + self._boundary)
        await self._read_through(self._newline)
        self.part_type = (await self._headers()).get("content-type")
        return parse_json(text)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The second part's bytes as they arrive. Raises 400 if the body ends before its closing boundary."""
        end = self._newline + self._boundary
        while True:
            before, boundary, _ = self._buffer.partition(end)
            if boundary:
                yield before
                return
            keep = len(end) - 1
            yield self._buffer[:-keep]
            self._buffer = self._buffer[-keep:]
            await self._more()

    async def _headers(self) -> dict[str, str]:
        """The header lines of a part; consumes the empty line after them."""
        headers = {}
        while line := await self._read_through(self._newline):
            name, _, value = line.decode("utf-8", "replace").partition(":")
            headers[name.strip().lower()] = value.strip()
        return headers

    async def _starts_with(self, prefix: bytes) -> bool:
        while len(self._buffer) < len(prefix):
            await self._more()
        return self._buffer.startswith(prefix)

    async def _read_through(self, end: bytes) -> bytes:
        """Return the bytes before `end`, and consume `end` too."""
        while (position := self._buffer.find(end)) < 0:
            if len(self._buffer) > MAX_JSON_BYTES:
                raise invalid("The multipart body has no second part in its first 16 MiB")
            await self._more()
        before = self._buffer[:position]
        self._buffer = self._buffer[position + len(end) :]
        return before

    async def _more(self) -> None:
        chunk = await self._content.readany()
        if not chunk:
            raise invalid("Malformed multipart body: it ends before its closing boundary", "badRequest")
        self._buffer += chunk


async def send_media(call: Call, stored: StoredObject, blobs: BlobStore) -> web.StreamResponse:
    """Answer alt=media: the object, the requested range, or for a client without gzip the decompressed bytes."""
    if call.request is None:
        raise invalid("Downloads are not supported inside a batch request")
    with blobs.open(stored.content.blob) as file:
        headers = _media_headers(stored)
        if _must_gunzip(call, stored):
            return await _send_gunzipped(call.request, headers, stored, file, blobs)
        first, count, status = 0, stored.content.size, 200
        if part := _byte_range(call.headers.get("Range", ""), count):
            headers["Content-Range"] = f"bytes {part[0]}-{part[0] + part[1] - 1}/{count}"
            # A client compares the hash with the bytes of its response; the whole object's hash would not match.
            del headers["X-Goog-Hash"]
            first, count, status = *part, 206
        file.seek(first)
        if count <= FLUSH_BYTES:
            return web.Response(body=file.read(count), status=status, headers=headers)
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = count
        return await _stream(call.request, response, _Limited(file, count).read, blobs)


def _checked_hash(name: str, value: object) -> str:
    if name not in _HASH_LENGTHS:
        raise invalid(f"Invalid hash {name!r} in X-Goog-Hash; expected md5 or crc32c")
    try:
        well_formed = len(base64.b64decode(str(value), validate=True)) == _HASH_LENGTHS[name]
    except (binascii.Error, ValueError):
        well_formed = False
    if not well_formed:
        raise invalid(f"Invalid {name}: {value!r}; expected {_HASH_LENGTHS[name]} bytes in base64")
    return str(value)


def _media_headers(stored: StoredObject) -> dict[str, str]:
    content = stored.content
    attributes = stored.attributes
    hashes = [f"crc32c={content.crc32c}"] + ([f"md5={content.md5}"] if content.md5 else [])
    headers = {
        "Content-Type": attributes.get("contentType", "application/octet-stream"),
        "Content-Encoding": attributes.get("contentEncoding"),
        "Content-Disposition": attributes.get("contentDisposition"),
        "Content-Language": attributes.get("contentLanguage"),
        "Cache-Control": attributes.get("cacheControl", "no-cache, no-store, max-age=0, must-revalidate"),
        "ETag": stored.etag,
        "Accept-Ranges": "bytes",
        "X-Goog-Generation": str(stored.generation),
        "X-Goog-Metageneration": str(stored.metageneration),
        "X-Goog-Storage-Class": attributes.get("storageClass", "STANDARD"),
        "X-Goog-Hash": ",".join(hashes),
        "X-Goog-Stored-Content-Encoding": attributes.get("contentEncoding", "identity"),
        "X-Goog-Stored-Content-Length": str(content.size),
    }
    return {name: value for name, value in headers.items() if value}


def _byte_range(header: str, size: int) -> tuple[int, int] | None:
    """First byte and count; None unless the header is a single byte range. Raises 416 for a range beyond the end."""
    match = _RANGE.fullmatch(header)
    if not match:
        return None
    first_text, last_text, suffix = match.groups()
    if suffix is not None:
        first, last = max(0, size - int(suffix)), size - 1
    else:
        first, last = int(first_text), min(int(last_text or size), size - 1)
    if first > last:
        raise StorageError(
            416, "requestedRangeNotSatisfiable", f"The requested range {header!r} cannot be satisfied: {size} bytes"
        )
    return first, last - first + 1


def _must_gunzip(call: Call, stored: StoredObject) -> bool:
    """Decompressive transcoding (https://cloud.google.com/storage/docs/transcoding)."""
    return (
        stored.attributes.get("contentEncoding") == "gzip"
        and "gzip" not in call.headers.get("Accept-Encoding", "")
        and "no-transform" not in stored.attributes.get("cacheControl", "")
    )


async def _send_gunzipped(
    request: web.Request, headers: dict[str, str], stored: StoredObject, file: BinaryIO, blobs: BlobStore
) -> web.StreamResponse:
    """The whole object decompressed, also for a range request, without the stored bytes' hash and length."""
    for name in ("X-Goog-Hash", "Content-Encoding", "Accept-Ranges"):
        del headers[name]
    headers |= {"Warning": '214 UploadServer "gunzipped"', "Vary": "Accept-Encoding"}
    gunzip = _Gunzip(file)
    try:
        await blobs.run(gunzip.peek)
    except zlib.error as error:
        message = f"{stored.bucket}/{stored.name} has contentEncoding 'gzip', but its bytes are not gzip: {error}"
        raise invalid(f"{message}; download it with Accept-Encoding: gzip") from None
    return await _stream(request, web.StreamResponse(headers=headers), gunzip.read, blobs)


async def _stream(
    request: web.Request, response: web.StreamResponse, read: Callable[[], bytes], blobs: BlobStore
) -> web.StreamResponse:
    """Send the pieces that `read` returns until it returns b"". A failure aborts the connection."""
    await response.prepare(request)
    try:
        while chunk := await blobs.run(read):
            await response.write(chunk)
    except (StorageError, zlib.error):
        # The status was sent already, and a normal end would make the truncated object look complete.
        log.exception("the download of %s was aborted", request.path)
        if request.transport:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


class _Limited:
    """Reads the next `count` bytes of a file, piece by piece."""

    def __init__(self, file: BinaryIO, count: int) -> None:
        self._file = file
        self._left = count

    def read(self) -> bytes:
        chunk = self._file.read(min(self._left, FLUSH_BYTES))
        self._left -= len(chunk)
        return chunk


class _Gunzip:
    """Decompresses a file piece by piece: a small file may decompress to more than the memory holds."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._first: bytes | None = None

    def peek(self) -> None:
        """Decompress the first piece. Raises zlib.error for bytes that are not gzip."""
        self._first = self.read()

    def read(self) -> bytes:
        """The next piece, empty at the end."""
        if self._first is not None:
            piece, self._first = self._first, None
            return piece
        while True:
            pending = self._decoder.unconsumed_tail or self._decoder.unused_data or self._file.read(FLUSH_BYTES)
            if self._decoder.eof and pending:  # gzip allows several members one after the other
                self._decoder = zlib.decompressobj(zlib.MAX_WBITS | 16)
            piece = self._decoder.decompress(pending, FLUSH_BYTES)
            if piece or not pending:
                return piece
