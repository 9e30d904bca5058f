"""Requests and replies of the JSON API, which come over HTTP or inside a batch; refusals in Cloud Storage's JSON."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import StreamReader, web
from multidict import MultiDict, MultiMapping

from dropforge_local.base.errors import ApiError

from ..kit import paging
from ..kit.fields import select
from ..kit.routing import Call, Reply, Router, parse_object
from .errors import StorageError, database_full, invalid, not_emulated

MAX_JSON_BYTES = 16 * 2**20


async def answer(router: Router, call: Call) -> Reply | web.StreamResponse:
    """Call the handler of a call; a refusal becomes a reply in Cloud Storage's JSON."""
    try:
        handler, matched = _find(router, call)
        result: Reply | web.StreamResponse = await handler(matched)
        return _selected(call, result)
    except StorageError as error:
        return refusal(error)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
            raise
        # The transaction is rolled back, so no partial change is visible.
        return refusal(database_full(error))


def _selected(call: Call, result: Reply | web.StreamResponse) -> Reply | web.StreamResponse:
    """The reply with the fields that the query selects."""
    fields = call.query.get("fields", "")
    if not fields or not isinstance(result, Reply) or result.body is None:
        return result
    try:
        return replace(result, body=select(result.body, fields))
    except ValueError as error:
        raise invalid(str(error), "invalidParameter") from None


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


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, {} for an empty body."""
    try:
        return parse_object(body)
    except ValueError as error:
        raise invalid(f"Parse Error: {error}", "parseError") from None


def read_token(query: Mapping[str, str], *first: Any) -> list[Any]:
    """The key in the query's pageToken; `first` without a token."""
    token = query.get("pageToken", "")
    try:
        return paging.read_token(token, first)
    except ApiError:
        raise invalid(f"Invalid pageToken: {token!r}; expected the nextPageToken of an earlier page") from None


async def read_body(content: StreamReader) -> bytes:
    """The whole body, if it is at most MAX_JSON_BYTES long."""
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > MAX_JSON_BYTES:
            raise StorageError(413, "uploadTooLarge", f"The body is longer than {MAX_JSON_BYTES} bytes")
    return bytes(body)


def stream_of(call: Call) -> StreamReader:
    """The body as a stream: an upload is never read into memory as a whole."""
    assert call.request is not None, "a batch holds no uploads"
    return call.request.content


def _find(router: Router, call: Call) -> Any:
    try:
        match = router.find(replace(call, path=call.path.rstrip("/")))
    except UnicodeDecodeError:
        raise invalid(f"The path is not valid UTF-8: {call.path!r}", "badRequest") from None
    if match is None:
        raise not_emulated(f"{call.method} {call.path}")
    return match
