"""The transport for `https://`: aiohttp, with connections that stay open."""

from __future__ import annotations

import ssl

import aiohttp

from ..limits import Limits
from .http import HttpRequest, HttpResponse, connection_broke, connection_failed, join_headers, timeout_error


class AiohttpTransport:
    """Opens its session at the first request, and keeps connections to every host alive."""

    def __init__(self, response_bytes: int = Limits().response_bytes, connections: int = 256) -> None:
        self._response_bytes = response_bytes
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def send(self, request: HttpRequest) -> HttpResponse:
        session = self._open()
        timeout = aiohttp.ClientTimeout(total=request.timeout or None)
        try:
            async with session.request(
                request.method, request.url, headers=request.headers, data=request.body, timeout=timeout
            ) as answer:
                return HttpResponse(answer.status, join_headers(answer.headers.items()), await self._read(answer))
        except TimeoutError as error:
            raise timeout_error(request) from error
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise connection_failed(request, error) from error
        except (aiohttp.ClientError, ConnectionError, ssl.SSLError, ValueError) as error:
            raise connection_broke(request, error) from error

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        if answer.content_length is not None and answer.content_length <= self._response_bytes:
            return await answer.read()
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > self._response_bytes:
                break  # HttpCaller refuses a body over the limit
        return bytes(body)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=60)
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), skip_auto_headers=["User-Agent"]
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
