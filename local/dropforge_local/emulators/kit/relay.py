"""Relaying an HTTP request to a server on this machine, and its answer back to the client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

# Headers for a single connection: RFC 9110, section 7.6.1.
HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade",
})  # fmt: skip

HEAD_SENT = web.RequestKey("head_sent", bool)


async def relay(
    session: aiohttp.ClientSession, request: web.BaseRequest, url: URL, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Send the client's request with `headers` to `url`, and the answer to the client.

    An answer that breaks off closes the client's connection. Raises aiohttp.ClientError if no answer begins.
    """
    async with await _request(session, request, url, headers) as upstream:
        response = _response(upstream)
        request[HEAD_SENT] = True
        await response.prepare(request)
        try:
            await _copy_body(upstream, response)
        except (aiohttp.ClientError, ConnectionError):
            return cut(request)
        return response


async def _request(
    session: aiohttp.ClientSession, request: web.BaseRequest, url: URL, headers: Mapping[str, str]
) -> aiohttp.ClientResponse:
    """Send the client's request with `headers` to `url`; return the upstream response, whose body is still unread."""
    return await session.request(
        request.method,
        url,
        headers=headers,
        data=request.content if request.body_exists else None,
        allow_redirects=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


def _response(upstream: aiohttp.ClientResponse) -> web.StreamResponse:
    """The unsent response to the client, with the status and the end-to-end headers of the upstream response."""
    response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
    for name, value in end_to_end(upstream.headers).items():
        response.headers.add(name, value)
    return response


async def _copy_body(upstream: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
    async for chunk in upstream.content.iter_any():
        await response.write(chunk)
    await response.write_eof()


def end_to_end(headers: Mapping[str, str], dropped: Iterable[str] = ()) -> CIMultiDict[str]:
    """Headers without hop-by-hop headers, headers that Connection names, and `dropped` (lower case)."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    removed = HOP_BY_HOP.union(named, dropped)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in removed)


def cut(request: web.BaseRequest) -> web.Response:
    """Close the connection: after the head, nothing else tells the client that an answer is incomplete."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)


def fail(request: web.BaseRequest, status: int, text: str) -> web.Response:
    """Refuse a request that `relay` did not answer in full; if the client has the head of an answer, cut it."""
    return cut(request) if request.get(HEAD_SENT) else refuse(status, text)


def refuse(status: int, text: str) -> web.Response:
    """The answer of the platform itself, in the place of the server's."""
    return web.Response(status=status, text=f"{text}\n")
