"""The upload root: media, multipart and resumable uploads (https://cloud.google.com/storage/docs/uploads-downloads)."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from aiohttp import web

from ..kit.routing import Call, Reply, Route
from .blobs import GRANULE_BYTES, BlobWriter, Digest
from .errors import StorageError, invalid
from .media import RelatedBody, check_hashes, expected_hashes
from .models import Attributes, Content
from .preconditions import Preconditions
from .resources import object_attributes, object_json
from .state import State
from .uploads import Upload
from .wire import parse_json, read_body, stream_of

_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)")


@dataclass(frozen=True)
class _Chunk:
    """A Content-Range: the position of a PUT's bytes, and the upload's total size if it is known.

    Without `first`, the request asks for the upload's state. Without `last`, the body's length is open.
    """

    first: int | None
    last: int | None
    total: int | None

    @classmethod
    def parse(cls, header: str | None) -> _Chunk:
        if header is None:
            return cls(0, None, None)
        if match := _CONTENT_RANGE.fullmatch(header.strip()):
            first, last, total = (int(text) if text and text != "*" else None for text in match.groups())
            if first is None or last is None or first <= last < (2**63 if total is None else total):
                return cls(first, last, total)
        raise invalid(f"Invalid Content-Range: {header!r}; expected 'bytes FIRST-LAST/TOTAL' or 'bytes */TOTAL'")


class UploadRoutes:
    """Handlers below /upload/storage/v1."""

    def __init__(self, state: State) -> None:
        self._state = state
        # Digests of open sessions: only after a restart does the emulator read a session's bytes again.
        self._digests: dict[str, Digest] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def routes(self) -> list[Route]:
        return [
            Route("POST", "b/{bucket}/o", self.insert),
            Route("PUT", "b/{bucket}/o", self.resume),
            Route("DELETE", "b/{bucket}/o", self.cancel),
        ]

    async def insert(self, call: Call) -> Reply:
        """Create an object from one request, or open a resumable session."""
        if call.query.get("upload_id"):
            return await self.resume(call)  # gcsfs continues a session with POST, which Google accepts
        kinds = {"media": self._media, "multipart": self._multipart, "resumable": self._start}
        kind = call.query.get("uploadType")
        if kind not in kinds:
            raise invalid(f"Invalid value for uploadType: {kind!r}; expected one of {', '.join(kinds)}")
        if call.query.get("predefinedAcl"):
            raise invalid("Cannot use predefinedAcl when uniform bucket-level access is enabled, as it is here")
        return await kinds[kind](call)

    async def resume(self, call: Call) -> Reply:
        """Receive a chunk of a resumable upload, or answer its state."""
        chunk = _Chunk.parse(call.headers.get("Content-Range"))
        bucket, upload_id = call.names["bucket"], _upload_id(call)
        if chunk.first is None and chunk.total is None:
            return _state_reply(self._state.uploads.get(bucket, upload_id))
        async with self._locks.setdefault(upload_id, asyncio.Lock()):
            upload = self._state.uploads.get(bucket, upload_id)
            if upload.result is not None:
                return _state_reply(upload)
            if chunk.first is None and chunk.total != upload.received:
                return _state_reply(upload)
            return await self._receive(call, upload, chunk)

    async def cancel(self, call: Call) -> Reply:
        """End a session; the real service confirms that with 499."""
        upload_id = _upload_id(call)
        async with self._locks.setdefault(upload_id, asyncio.Lock()):
            upload = self._state.uploads.get(call.names["bucket"], upload_id)
            self._forget(upload)
        return Reply(status=499)

    async def _media(self, call: Call) -> Reply:
        body = {
            "contentType": call.headers.get("Content-Type"),
            "contentEncoding": call.query.get("contentEncoding"),
        }
        hashes = expected_hashes(call.headers, {})
        return await self._store(call, _name(call, {}), object_attributes(body), hashes, stream_of(call).iter_any())

    async def _multipart(self, call: Call) -> Reply:
        related = RelatedBody(stream_of(call), call.headers.get("Content-Type", ""))
        resource = await related.resource()
        attributes = object_attributes({"contentType": related.part_type} | resource)
        hashes = expected_hashes({"X-Goog-Hash": call.headers.get("X-Goog-Hash", "")}, resource)
        return await self._store(call, _name(call, resource), attributes, hashes, related.chunks())

    async def _start(self, call: Call) -> Reply:
        resource = parse_json(await read_body(stream_of(call)))
        bucket, name = call.names["bucket"], _name(call, resource)
        attributes = object_attributes({"contentType": call.headers.get("X-Upload-Content-Type")} | resource)
        preconditions = Preconditions.from_query(call.query)
        self._state.objects.check_create(bucket, name, preconditions)
        hashes = expected_hashes({"X-Goog-Hash": call.headers.get("X-Goog-Hash", "")}, resource)
        blob = self._state.blobs.writer().blob
        upload_id = uuid.uuid4().hex
        self._state.uploads.start(Upload(upload_id, 0, bucket, name, attributes, preconditions, hashes, blob))
        location = f"{call.base_url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload_id}"
        return Reply(headers={"Location": location, "X-GUploader-UploadID": upload_id})

    async def _store(
        self, call: Call, name: str, attributes: Attributes, hashes: dict[str, str], chunks: AsyncIterator[bytes]
    ) -> Reply:
        """Write the bytes to a new blob, then commit the object that names it."""
        bucket, preconditions = call.names["bucket"], Preconditions.from_query(call.query)
        self._state.objects.check_create(bucket, name, preconditions)
        writer = self._state.blobs.writer()
        try:
            async for chunk in chunks:
                await writer.write(chunk)
            content = await writer.finish()
            check_hashes(content, hashes)
            stored = self._state.objects.create(bucket, name, content, attributes, preconditions)
        finally:
            self._state.objects.discard_blob(writer.blob)
        return Reply(object_json(stored, call.base_url))

    async def _receive(self, call: Call, upload: Upload, chunk: _Chunk) -> Reply:
        """Append a chunk without the bytes that the session already has; finish at the last byte."""
        writer = BlobWriter(self._state.blobs, _blob(upload), await self._digest(upload))
        first = upload.received if chunk.first is None else chunk.first
        if first > upload.received:
            raise invalid(
                f"According to the Content-Range header, the upload offset is {first} byte(s), "
                f"which exceeds already uploaded size of {upload.received} byte(s)"
            )
        end = first
        try:
            async for data in stream_of(call).iter_any():
                await writer.write(data[max(0, upload.received - end) :])
                end += len(data)
        except (ConnectionError, web.RequestPayloadError):
            await self._keep(upload, writer)
            raise
        if chunk.last is not None and end != chunk.last + 1:
            await self._keep(upload, writer)
            raise invalid(f"Content-Range announced bytes {first}-{chunk.last}, but {end - first} byte(s) arrived")
        if end == chunk.total or call.headers.get("Content-Range") is None:
            return await self._finish(call, upload, await writer.finish())
        return await self._pause(upload, writer, end)

    async def _pause(self, upload: Upload, writer: BlobWriter, end: int) -> Reply:
        received = await self._keep(upload, writer)
        if received == upload.received < end:
            raise invalid(
                f"Invalid request. The number of bytes uploaded is {end - upload.received}; it is required to be equal "
                f"or greater than {GRANULE_BYTES}, except for the final request"
            )
        return _progress(received)

    async def _keep(self, upload: Upload, writer: BlobWriter) -> int:
        """Make the complete granules durable; the upload continues after them."""
        received = await writer.keep_granules()
        self._state.uploads.record(upload.id, received)
        self._digests[upload.id] = writer.digest
        return received

    async def _finish(self, call: Call, upload: Upload, content: Content) -> Reply:
        """Commit the object and the session's result in one transaction. A permanent refusal ends the session."""
        hashes = expected_hashes({"X-Goog-Hash": call.headers.get("X-Goog-Hash", "")}, {})
        try:
            check_hashes(content, upload.hashes | hashes)
            with self._state.db.transaction():
                stored = self._state.objects.create(
                    upload.bucket, upload.name, content, upload.attributes, upload.preconditions
                )
                resource = object_json(stored, call.base_url)
                self._state.uploads.complete(upload.id, resource)
        except StorageError:
            self._forget(upload)
            raise
        self._digests.pop(upload.id, None)
        return Reply(resource)

    async def _digest(self, upload: Upload) -> Digest:
        digest = self._digests.pop(upload.id, None) or Digest()
        if digest.size != upload.received:
            digest = await self._state.blobs.digest(_blob(upload), upload.received)
        return digest

    def _forget(self, upload: Upload) -> None:
        self._digests.pop(upload.id, None)
        self._state.uploads.delete(upload.id)
        if upload.blob:
            self._state.objects.discard_blob(upload.blob)


def _name(call: Call, resource: dict[str, Any]) -> str:
    """The query's name wins over the resource's, as in the real service."""
    name = call.query.get("name") or resource.get("name")
    if not isinstance(name, str):
        raise invalid(f"Invalid object name: {name!r}; expected a string in the query or the resource", "required")
    return name


def _upload_id(call: Call) -> str:
    upload_id = call.query.get("upload_id")
    if not upload_id:
        raise invalid("Required parameter: upload_id", "required")
    return upload_id


def _blob(upload: Upload) -> str:
    assert upload.blob is not None, "a session without a result has a blob"
    return upload.blob


def _state_reply(upload: Upload) -> Reply:
    return _progress(upload.received) if upload.result is None else Reply(upload.result)


def _progress(received: int) -> Reply:
    """308 with the durable range, or without a range before the first byte."""
    return Reply(status=308, headers={"Range": f"bytes=0-{received - 1}"} if received else {})
