"""b/{bucket}/o and below: the JSON API's methods on objects, except uploads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, BinaryIO

from aiohttp import web

from ..kit.routing import Call, Reply, Route
from .blobs import FLUSH_BYTES, BlobWriter
from .bucket_routes import listing, max_results
from .errors import invalid
from .listing import list_objects
from .media import send_media
from .models import Content, Edit, StoredObject
from .permissions import require_object
from .preconditions import Preconditions, parse_int64
from .resources import object_attributes, object_json, shape_of
from .retention import HOLDS, RELEASED
from .state import State
from .wire import parse_json

MAX_COMPOSE_SOURCES = 32


class ObjectRoutes:
    """Handlers for objects."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._objects = state.objects

    def routes(self) -> list[Route]:
        source = "b/{source_bucket}/o/{source_object}"
        destination = "b/{bucket}/o/{object}"
        return [
            Route("GET", "b/{bucket}/o", self.list),
            Route("POST", "b/{bucket}/o", self.insert_without_media),
            Route("GET", destination, self.get),
            Route("PATCH", destination, self.patch),
            Route("PUT", destination, self.update),
            Route("DELETE", destination, self.delete),
            Route("POST", f"{destination}/compose", self.compose),
            Route("POST", f"{source}/copyTo/{destination}", self.copy),
            Route("POST", f"{source}/rewriteTo/{destination}", self.rewrite),
            Route("POST", "b/{bucket}/o/{source_object}/moveTo/o/{object}", self.move),
        ]

    async def get(self, call: Call) -> Reply | web.StreamResponse:
        stored = self._objects.get(
            call.names["bucket"],
            call.names["object"],
            _generation(call),
            Preconditions.of_read(call.query, call.headers),
        )
        if call.query.get("alt") == "media":
            return await send_media(call, stored, self._state.blobs)
        return _reply(call, stored)

    async def list(self, call: Call) -> Reply:
        bucket = call.names["bucket"]
        self._state.buckets.get(bucket)
        shape = shape_of(call.query.get("fields", ""), call.base_url)
        page = list_objects(self._state.db, bucket, call.query, max_results(call), shape)
        return listing("storage#objects", page.items, page.next_token, prefixes=page.prefixes)

    async def insert_without_media(self, call: Call) -> Reply:
        raise invalid("Upload requests must go to /upload/storage/v1/..., with uploadType", "wrongUrlForUpload")

    async def patch(self, call: Call) -> Reply:
        body = parse_json(call.body)
        return self._change(call, lambda old: object_attributes(body, old))

    async def update(self, call: Call) -> Reply:
        body = parse_json(call.body)
        return self._change(call, lambda old: object_attributes(body))

    async def delete(self, call: Call) -> Reply:
        self._objects.delete(
            call.names["bucket"], call.names["object"], _generation(call), Preconditions.from_query(call.query)
        )
        return Reply(status=204)

    async def compose(self, call: Call) -> Reply:
        body = parse_json(call.body)
        attributes = object_attributes(_object_field(body, "destination"))
        preconditions = Preconditions.from_query(call.query)
        bucket, name = call.names["bucket"], call.names["object"]
        self._objects.check_create(bucket, name, preconditions)
        sources = [self._compose_source(bucket, source) for source in _compose_list(body)]
        writer = self._state.blobs.writer()
        try:
            with ExitStack() as stack:
                # Open every source before the first await: another call may delete or overwrite it during the copy.
                files = [stack.enter_context(self._state.blobs.open(source.content.blob)) for source in sources]
                content = await self._concatenate(files, writer)
            count = sum(source.content.component_count or 1 for source in sources)
            composite = replace(content, md5=None, component_count=count)
            stored = self._objects.create(bucket, name, composite, attributes, preconditions)
        finally:
            self._objects.discard_blob(writer.blob)
        return _reply(call, stored)

    async def copy(self, call: Call) -> Reply:
        return _reply(call, self._copy(call))

    async def rewrite(self, call: Call) -> Reply:
        """A copy shares its source's blob, so that a rewrite is always done in its first call."""
        stored = self._copy(call)
        size = str(stored.content.size)
        return Reply(
            {
                "kind": "storage#rewriteResponse",
                "totalBytesRewritten": size,
                "objectSize": size,
                "done": True,
                "resource": object_json(stored, call.base_url),
            }
        )

    async def move(self, call: Call) -> Reply:
        bucket = call.names["bucket"]
        source = self._source(call, bucket)
        if source.name == call.names["object"]:
            raise invalid(f"Cannot move an object onto itself: {source.name!r}")
        stored = self._objects.move(bucket, source, call.names["object"], Preconditions.from_query(call.query))
        return _reply(call, stored)

    def _change(self, call: Call, edit: Edit) -> Reply:
        names = call.names
        preconditions = Preconditions.from_query(call.query)
        stored = self._objects.change(names["bucket"], names["object"], _generation(call), preconditions, edit)
        return _reply(call, stored)

    def _copy(self, call: Call) -> StoredObject:
        body = parse_json(call.body)
        with self._state.db.transaction():
            source = self._source(call, call.names["source_bucket"])
            # The copy takes a field that the request omits from the source.
            attributes = {name: value for name, value in source.attributes.items() if name not in (*HOLDS, RELEASED)}
            if "metadata" in body:
                attributes.pop("metadata", None)
            return self._objects.create(
                call.names["bucket"],
                call.names["object"],
                source.content,
                object_attributes(body, attributes),
                Preconditions.from_query(call.query),
            )

    def _source(self, call: Call, bucket: str) -> StoredObject:
        preconditions = Preconditions.from_query(call.query, "Source")
        return self._objects.get(
            bucket, call.names["source_object"], _generation(call, "sourceGeneration"), preconditions
        )

    def _compose_source(self, bucket: str, source: object) -> StoredObject:
        if not isinstance(source, dict) or not isinstance(source.get("name"), str):
            raise invalid(f"Invalid source object {source!r}; expected an object with a name")
        require_object("storage.objects.get", bucket, source["name"])
        generation = source.get("generation")
        conditions = _object_field(source, "objectPreconditions")
        query = {name: str(value) for name, value in conditions.items() if name == "ifGenerationMatch"}
        return self._objects.get(
            bucket,
            source["name"],
            None if generation is None else parse_int64(str(generation), "generation"),
            Preconditions.from_query(query),
        )

    async def _concatenate(self, files: Sequence[BinaryIO], writer: BlobWriter) -> Content:
        for file in files:
            while chunk := await self._state.blobs.run(file.read, FLUSH_BYTES):
                await writer.write(chunk)
        return await writer.finish()


def _reply(call: Call, stored: StoredObject) -> Reply:
    return Reply(object_json(stored, call.base_url))


def _generation(call: Call, parameter: str = "generation") -> int | None:
    value = call.query.get(parameter)
    return None if value is None else parse_int64(value, parameter)


def _compose_list(body: dict[str, Any]) -> list[object]:
    sources = body.get("sourceObjects")
    if not isinstance(sources, list) or not 1 <= len(sources) <= MAX_COMPOSE_SOURCES:
        count = len(sources) if isinstance(sources, list) else None
        raise invalid(f"The number of source components is {count}; expected 1 to {MAX_COMPOSE_SOURCES}")
    return sources


def _object_field(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise invalid(f"Invalid value for {name}: {value!r}; expected a JSON object")
    return value or {}
