"""Multipart uploads of the XML API, which `transfer_manager.upload_chunks_concurrently` and S3's clients make.

https://cloud.google.com/storage/docs/multipart-uploads. The API's other requests answer 501.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from xml.etree import ElementTree

from aiohttp import web

from ..kit.routing import Call, Reply, Route, Router
from .blobs import FLUSH_BYTES
from .errors import StorageError, invalid
from .media import check_hashes, expected_hashes
from .models import Attributes, Content
from .parts import Multipart, Multiparts, Part
from .permissions import guarded
from .preconditions import Preconditions
from .resources import object_attributes
from .state import State
from .wire import answer, read_body, read_target, stream_of

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
PREFIXES = ("x-goog-meta-", "x-amz-meta-")
HEADERS = {
    "Cache-Control": "cacheControl",
    "Content-Disposition": "contentDisposition",
    "Content-Encoding": "contentEncoding",
    "Content-Language": "contentLanguage",
    "Content-Type": "contentType",
    "X-Goog-Storage-Class": "storageClass",
}
MOST_PARTS = 10_000
LEAST_PART_BYTES = 5 * 2**20  # of every part but the last
PAGE = 1000
CODES = {  # of refusals that the JSON API has, too
    "forbidden": "AccessDenied",
    "insufficientStorage": "ServiceUnavailable",
    "invalid": "InvalidArgument",
    "notFound": "NoSuchBucket",
    "notImplemented": "NotImplemented",
    "retentionPolicyNotMet": "AccessDenied",
}


class XmlRoutes:
    """Handlers of paths /BUCKET/OBJECT, chosen by the query."""

    def __init__(self, state: State, multiparts: Multiparts) -> None:
        self._state = state
        self._multiparts = multiparts
        one = "/{bucket}/{object=**}"
        routes = {
            "uploads": [Route("POST", one, self.initiate), Route("GET", "/{bucket}", self.list_uploads)],
            "uploadId": [
                Route("PUT", one, self.upload_part),
                Route("POST", one, self.complete),
                Route("DELETE", one, self.abort),
                Route("GET", one, self.list_parts),
            ],
        }
        self._routers = {name: Router([guarded(route) for route in each]) for name, each in routes.items()}

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The last routes of a server: any other API's path has precedence."""
        return [web.route("*", path, self._serve) for path in ("/{bucket}", r"/{bucket}/{object:[\s\S]+}")]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        router = next((router for name, router in self._routers.items() if name in request.query), None)
        if router is None:
            raise web.HTTPNotFound
        try:
            path, query = read_target(request.raw_path)
            origin = f"{request.scheme}://{request.host}"
            reply = await answer(router, Call(request.method, path, query, request.headers, origin, b"", request))
            if isinstance(reply, Reply) and reply.status >= 400:
                problem = reply.body["error"]
                reply = _refusal(reply.status, problem["errors"][0]["reason"], problem["message"])
        except web.RequestPayloadError as error:
            reply = _refusal(400, "IncompleteBody", f"The body is malformed: {error}")
        except ConnectionError:
            reply = web.Response(status=499)  # the client hung up during its upload and reads no answer
        return reply.response() if isinstance(reply, Reply) else reply

    async def initiate(self, call: Call) -> web.Response:
        bucket, name = call.names["bucket"], call.names["object"]
        self._state.objects.check_create(bucket, name, Preconditions())
        upload = self._multiparts.start(bucket, name, object_attributes(_resource(call)))
        return _answer("InitiateMultipartUploadResult", _name(upload))

    async def upload_part(self, call: Call) -> web.Response:
        upload, number = self._upload(call), _number(call, "partNumber", 0)
        if not 0 < number <= MOST_PARTS:
            raise invalid(f"partNumber is {number}; expected 1 to {MOST_PARTS}", "InvalidArgument")
        writer = self._state.blobs.writer()
        try:
            async for chunk in stream_of(call).iter_any():
                await writer.write(chunk)
            content = await writer.finish()
            _check(content, call)
            etag = f'"{base64.b64decode(content.md5 or "").hex()}"'
            self._multiparts.put(upload, number, content, etag)
        finally:
            self._state.objects.discard_blob(writer.blob)
        hashes = f"crc32c={content.crc32c},md5={content.md5}"
        return web.Response(headers={"ETag": etag, "X-Goog-Hash": hashes})

    async def complete(self, call: Call) -> web.Response:
        """Join the parts that the body lists. The object has no MD5, as in the real service."""
        upload = self._upload(call)
        chosen = self._chosen(upload, _listed(await read_body(stream_of(call))))
        writer = self._state.blobs.writer()
        try:
            with ExitStack() as stack:
                # Open every part before the first await: another call may replace it during the copy.
                files = [stack.enter_context(self._state.blobs.open(part.content.blob)) for part in chosen]
                for file in files:
                    while chunk := await self._state.blobs.run(file.read, FLUSH_BYTES):
                        await writer.write(chunk)
            content = replace(await writer.finish(), md5=None)
            with self._state.db.transaction():
                self._multiparts.end(upload)
                stored = self._state.objects.create(
                    upload.bucket, upload.name, content, upload.attributes, Preconditions()
                )
        finally:
            self._state.objects.discard_blob(writer.blob)
        found = {
            "Location": f"{call.base_url}{call.path}",
            **_name(upload, "Bucket", "Key"),
            "ETag": f'"{stored.etag}"',
        }
        headers = {"X-Goog-Generation": str(stored.generation), "X-Goog-Hash": f"crc32c={content.crc32c}"}
        return _answer("CompleteMultipartUploadResult", found, headers=headers)

    async def abort(self, call: Call) -> web.Response:
        self._multiparts.end(self._upload(call))
        return web.Response(status=204)

    async def list_parts(self, call: Call) -> web.Response:
        upload, limit = self._upload(call), min(_number(call, "max-parts", PAGE), PAGE)
        found = self._multiparts.parts(upload.id, _number(call, "part-number-marker", 0), limit + 1)
        page = found[:limit]
        fields = {**_name(upload), "StorageClass": str(upload.attributes.get("storageClass", "STANDARD"))}
        fields |= {"MaxParts": str(limit), **_truncated(found, page)}
        if len(found) > len(page):
            fields["NextPartNumberMarker"] = str(page[-1].number)
        return _answer("ListPartsResult", fields, [("Part", _shown(part)) for part in page])

    async def list_uploads(self, call: Call) -> web.Response:
        bucket, limit = call.names["bucket"], min(_number(call, "max-uploads", PAGE), PAGE)
        if call.query.get("delimiter"):
            raise StorageError(501, "NotImplemented", "delimiter is not emulated by the local stack")
        self._state.buckets.get(bucket)
        key = call.query.get("key-marker", "")
        after = (key, call.query.get("upload-id-marker") or "\U0010ffff")
        found = self._multiparts.list(bucket, call.query.get("prefix", ""), after, limit + 1)
        page = found[:limit]
        fields = {"Bucket": bucket, "Prefix": call.query.get("prefix", ""), "KeyMarker": key, "MaxUploads": str(limit)}
        fields |= _truncated(found, page)
        if len(found) > len(page):
            fields |= {"NextKeyMarker": page[-1].name, "NextUploadIdMarker": page[-1].id}
        shown = [("Upload", {**_name(each, "Key", "UploadId"), "Initiated": each.created}) for each in page]
        return _answer("ListMultipartUploadsResult", fields, shown)

    def _upload(self, call: Call) -> Multipart:
        self._state.buckets.get(call.names["bucket"])
        return self._multiparts.get(call.names["bucket"], call.names["object"], call.query["uploadId"])

    def _chosen(self, upload: Multipart, listed: Sequence[tuple[int, str]]) -> list[Part]:
        """The parts of a completion. Raises 400 for a part that is missing, that differs, or that is too small."""
        known = {part.number: part for part in self._multiparts.parts(upload.id)}
        numbers = [number for number, _ in listed]
        if numbers != sorted(set(numbers)):
            raise invalid(f"The parts must be in ascending order, each once; they are {numbers}", "InvalidPartOrder")
        for number, etag in listed:
            if number not in known or known[number].etag.strip('"') != etag.strip('"'):
                raise invalid(f"Part {number} with the ETag {etag} was not uploaded", "InvalidPart")
        for number in numbers[:-1]:
            if (size := known[number].content.size) < LEAST_PART_BYTES:
                raise invalid(
                    f"Part {number} has {size} bytes; every part but the last has {LEAST_PART_BYTES} or more",
                    "EntityTooSmall",
                )
        return [known[number] for number in numbers]


def _resource(call: Call) -> Attributes:
    """The object's fields in the headers of an initiation."""
    found: Attributes = {field: call.headers[name] for name, field in HEADERS.items() if name in call.headers}
    metadata = {
        name[len(prefix) :].lower(): value
        for name, value in call.headers.items()
        for prefix in PREFIXES
        if name.lower().startswith(prefix)
    }
    return {**found, **({"metadata": metadata} if metadata else {})}


def _number(call: Call, name: str, default: int) -> int:
    text = call.query.get(name, "")
    if text and not re.fullmatch(r"\d{1,9}", text):
        raise invalid(f"{name} is {text!r}; expected a number", "InvalidArgument")
    return int(text) if text else default


def _check(content: Content, call: Call) -> None:
    try:
        check_hashes(content, expected_hashes(call.headers, {}))
    except StorageError as error:
        raise StorageError(400, "BadDigest", error.message) from error


def _listed(body: bytes) -> list[tuple[int, str]]:
    """The number and the ETag of each part in a CompleteMultipartUpload."""
    try:
        if b"<!DOCTYPE" in body:
            raise ValueError("it has a document type")
        parts = [each for each in ElementTree.fromstring(body) if _local(each.tag) == "Part"]
        found = [{_local(field.tag): field.text or "" for field in part} for part in parts]
        listed = [(int(part["PartNumber"]), part["ETag"]) for part in found]
    except (ElementTree.ParseError, KeyError, ValueError) as error:
        raise invalid(f"The body is no CompleteMultipartUpload in XML: {error}", "MalformedXML") from error
    if not listed:
        raise invalid("The body lists no part", "MalformedXML")
    return listed


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _name(upload: Multipart, *names: str) -> dict[str, str]:
    found = {"Bucket": upload.bucket, "Key": upload.name, "UploadId": upload.id}
    return {name: found[name] for name in names or found}


def _truncated(found: Sequence[object], page: Sequence[object]) -> dict[str, str]:
    return {"IsTruncated": str(len(found) > len(page)).lower()}


def _shown(part: Part) -> dict[str, str]:
    return {
        "PartNumber": str(part.number),
        "LastModified": part.updated,
        "ETag": part.etag,
        "Size": str(part.content.size),
    }


def _answer(
    name: str,
    fields: dict[str, str],
    items: Iterable[tuple[str, dict[str, str]]] = (),
    headers: dict[str, str] | None = None,
) -> web.Response:
    root = ElementTree.Element(name, xmlns=NAMESPACE)
    for parent, each in ((root, fields), *((ElementTree.SubElement(root, item), inner) for item, inner in items)):
        for field, text in each.items():
            ElementTree.SubElement(parent, field).text = text
    return _xml(root, 200, headers)


def _refusal(status: int, reason: str, message: str) -> web.Response:
    root = ElementTree.Element("Error")
    for field, text in (("Code", CODES.get(reason, reason)), ("Message", message), ("Details", message)):
        ElementTree.SubElement(root, field).text = text
    return _xml(root, status)


def _xml(root: ElementTree.Element, status: int, headers: dict[str, str] | None = None) -> web.Response:
    body = ElementTree.tostring(root, encoding="UTF-8", xml_declaration=True)
    return web.Response(body=body, status=status, headers=headers, content_type="application/xml", charset="UTF-8")
