"""Batches: several JSON calls in one multipart/mixed request. Each call has its own answer, in the same order."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from email.message import Message
from email.parser import BytesParser
from http import HTTPStatus

from aiohttp import web
from multidict import CIMultiDict

from ..kit.routing import JSON_TYPE, Call, Reply
from .errors import StorageError, invalid
from .wire import read_target, refusal

# The service's own limit is 100, but google-cloud-storage 3.17.1 sends up to 1,000.
MAX_CALLS = 1000
_HEAD_END = re.compile(rb"\r?\n\r?\n")
Answer = Callable[[Call], Awaitable[Reply | web.StreamResponse]]


async def answer_batch(answer: Answer, call: Call) -> web.Response:
    """Answer every part of a batch with `answer`. A part's path includes the root."""
    content_type = call.headers.get("Content-Type", "")
    head = f"Content-Type: {content_type}\r\n\r\n".encode("utf-8", "surrogateescape")
    message = BytesParser().parsebytes(head + call.body)
    parts = message.get_payload()
    if not isinstance(parts, list):
        raise invalid(f"Failed to parse batch request: Content-Type is {content_type!r}; expected multipart/mixed")
    if len(parts) > MAX_CALLS:
        raise invalid(f"The batch has {len(parts)} calls; expected at most {MAX_CALLS}")
    boundary = f"batch_{uuid.uuid4().hex}"
    answers = [await _answer_part(call, part, answer) for part in parts if isinstance(part, Message)]
    body = b"".join(f"--{boundary}\r\n".encode() + part for part in answers) + f"--{boundary}--\r\n".encode()
    return web.Response(body=body, headers={"Content-Type": f"multipart/mixed; boundary={boundary}"})


async def _answer_part(batch: Call, part: Message, answer: Answer) -> bytes:
    try:
        reply = await answer(_inner_call(batch, part))
        assert isinstance(reply, Reply), "inside a batch, only JSON is answered"
    except StorageError as error:
        reply = refusal(error)
    body = reply.encode()
    lines = [f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in reply.headers.items()]
    lines += [f"Content-Type: {JSON_TYPE}"] if body else []
    lines += [f"Content-Length: {len(body)}", "", ""]
    content_id = str(part.get("Content-ID", "<>")).replace("<", "<response-", 1)
    head = ["Content-Type: application/http", f"Content-ID: {content_id}", ""]
    return "\r\n".join(head + lines).encode("utf-8", "replace") + body + b"\r\n"


def _inner_call(batch: Call, part: Message) -> Call:
    """The HTTP request inside an application/http part."""
    text = part.get_payload(decode=True)
    if not isinstance(text, bytes):  # a nested multipart
        raise invalid(f"Failed to parse batch request: a part is {part.get_content_type()}; expected application/http")
    head, *rest = _HEAD_END.split(text.lstrip(), maxsplit=1)
    request_line, *header_lines = head.decode("utf-8", "replace").splitlines() or [""]
    words = request_line.split()
    if len(words) < 2:
        raise invalid(f"Failed to parse batch request: {request_line!r}; expected 'METHOD path HTTP/1.1'")
    path, query = read_target(words[1])
    headers: CIMultiDict[str] = CIMultiDict()
    for line in header_lines:
        name, _, value = line.partition(":")
        headers[name.strip()] = value.strip()
    return Call(words[0], path, query, headers, batch.base_url, b"".join(rest))
