"""Requests and replies of the JSON API, whether they came over HTTP or inside a batch, and the table of routes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

from aiohttp import StreamReader, web
from multidict import MultiDict, MultiMapping

from .errors import StorageError, database_full, invalid, not_emulated

MAX_JSON_BYTES = 16 * 2**20
JSON_TYPE = "application/json; charset=UTF-8"


@dataclass(frozen=True)
class Call:
    """One request. `names` are the variables of the matched path; `request` is None inside a batch."""

    method: str
    path: str
    query: MultiMapping[str]
    headers: Mapping[str, str]
    base_url: str
    body: bytes = b""
    request: web.Request | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> StreamReader:
        """The body as a stream, for uploads, which are never read into memory whole."""
        assert self.request is not None, "a batch holds no uploads"
        return self.request.content

    def json(self) -> dict[str, Any]:
        return parse_json(self.body)


@dataclass(frozen=True)
class Reply:
    """A JSON answer; `body` None sends no body."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        return b"" if self.body is None else json.dumps(self.body).encode()


Handler = Callable[[Call], Awaitable[Reply | web.StreamResponse]]


Route = tuple[str, str, Handler]
"""A method, a path pattern such as "b/{bucket}/o/{object}", and who answers."""


class Router:
    """Finds the handler of a call. An object's name is one quoted segment, so patterns have fixed lengths."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._table: dict[tuple[str, int], list[tuple[list[str], Handler]]] = {}
        for method, pattern, handler in routes:
            parts = pattern.split("/")
            self._table.setdefault((method, len(parts)), []).append((parts, handler))

    async def answer(self, call: Call) -> Reply | web.StreamResponse:
        """Call the handler; every refusal becomes a reply in Cloud Storage's JSON."""
        try:
            segments = [decode(segment) for segment in call.path.strip("/").split("/")]
            for parts, handler in self._table.get((call.method, len(segments)), []):
                names = _match(parts, segments)
                if names is not None:
                    return await handler(replace(call, names=names))
            raise not_emulated(f"{call.method} {call.path}")
        except StorageError as error:
            return refusal(error)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            # The transaction is rolled back, so nothing half-done is visible.
            return refusal(database_full(error))


def refusal(error: StorageError) -> Reply:
    return Reply(None if error.code == 304 else error.to_json(), error.code)


def read_target(target: str) -> tuple[str, MultiMapping[str]]:
    """Split a request target into its still quoted path and its decoded query."""
    path, _, query = target.partition("?")
    if "://" in path:  # the absolute form, which the client writes inside batches
        path = "/" + path.split("://", 1)[1].partition("/")[2]
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict")
    except UnicodeError:
        raise invalid(f"The query is not valid UTF-8: {query!r}", "badRequest") from None
    return path, MultiDict(pairs)


def decode(segment: str) -> str:
    """Unquote one path segment: an object's name is one segment, its slashes quoted."""
    try:
        return unquote_to_bytes(segment.encode("utf-8", "surrogateescape")).decode()
    except UnicodeDecodeError:
        raise invalid(f"The path is not valid UTF-8: {segment!r}", "badRequest") from None


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object; no body at all counts as an empty one."""
    if not body.strip():
        return {}
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate such as "\ud800" fits in no database
    except (ValueError, RecursionError) as error:
        raise invalid(f"Parse Error: the body is not valid JSON: {error}", "parseError") from None
    if not isinstance(value, dict):
        raise invalid(f"Parse Error: the body is a JSON {type(value).__name__}; expected an object", "parseError")
    return value


async def read_body(content: StreamReader, limit: int = MAX_JSON_BYTES) -> bytes:
    """The whole body, if it is at most `limit` bytes long."""
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > limit:
            raise StorageError(413, "uploadTooLarge", f"The body is longer than {limit} bytes")
    return bytes(body)


def to_response(reply: Reply | web.StreamResponse) -> web.StreamResponse:
    if not isinstance(reply, Reply):
        return reply
    headers = dict(reply.headers)
    if reply.body is not None:
        headers["Content-Type"] = JSON_TYPE
    return web.Response(body=reply.encode(), status=reply.status, headers=headers)


def _match(parts: Sequence[str], segments: Sequence[str]) -> dict[str, str] | None:
    names: dict[str, str] = {}
    for part, segment in zip(parts, segments, strict=True):
        if part.startswith("{"):
            names[part[1:-1]] = segment
        elif part != segment:
            return None
    return names
