"""The address of a service: it checks the caller, and streams requests to an instance and answers back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from dropforge_local.base.ports import HOST

from ..kit.relay import end_to_end, fail, refuse, relay
from .instances import Instance, Pool
from .workloads import Unready

log = logging.getLogger(__name__)

LARGEST_REQUEST = 32 * 2**20  # HTTP/1; https://cloud.google.com/run/quotas


class Listener:
    """A port of a service or of a traffic tag."""

    def __init__(
        self,
        port: int,
        session: aiohttp.ClientSession,
        route: Callable[[], Pool | None],
        is_allowed: Callable[[Mapping[str, str]], bool],
        count: Callable[[Pool, int, float], None],
        take_busy: Callable[[], bool],
    ) -> None:
        self.port = port
        self._session = session
        self._route = route
        self._is_allowed = is_allowed
        self._count = count
        self._take_busy = take_busy

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        # A caller that disconnects cancels its request: an unread answer must not keep an instance busy.
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self.port).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self._is_allowed(request.headers):
            return refuse(403, "Your client does not have permission to get this URL from this server.")
        if (request.content_length or 0) > LARGEST_REQUEST:
            return refuse(413, f"The request is larger than {LARGEST_REQUEST} bytes.")
        if "upgrade" in request.headers.get("Connection", "").lower():
            return refuse(501, "WebSockets are not emulated by the local stack.")
        pool = self._route()
        if pool is None:
            return refuse(503, "Service Unavailable: no revision is ready.")
        if self._take_busy():  # the instances that may exist had all their requests for too long
            return refuse(429, "Rate exceeded.")
        began = asyncio.get_running_loop().time()
        response = await self._answer(request, pool)
        self._count(pool, response.status, asyncio.get_running_loop().time() - began)
        return response

    async def _answer(self, request: web.BaseRequest, pool: Pool) -> web.StreamResponse:
        try:
            async with asyncio.timeout(pool.revision.timeout.total_seconds()):
                return await self._serve(request, pool)
        except Unready as error:
            return refuse(503, f"Service Unavailable: {error.message}")
        except TimeoutError:
            return fail(request, 504, "upstream request timeout")

    async def _serve(self, request: web.BaseRequest, pool: Pool) -> web.StreamResponse:
        for attempt in range(2):
            instance = await pool.acquire()
            try:
                return await self._forward(request, instance)
            except aiohttp.ClientConnectorError:
                # No byte was sent, so a second try is safe. The instance has just ended, before `_watch` noticed.
                await pool.suspect(instance)
                log.info("instance %s refuses connections (%d)", instance.container.id, attempt)
            except aiohttp.ClientConnectionError as error:
                log.info("request to instance %s failed: %s", instance.container.id, error)
                break
            finally:
                pool.release()
        return refuse(503, "Service Unavailable: the instance could not be reached, or it ended.")

    async def _forward(self, request: web.BaseRequest, instance: Instance) -> web.StreamResponse:
        url = URL(f"{instance.url}{request.raw_path}", encoded=True)
        return await relay(self._session, request, url, _forwarded_headers(request))


def _forwarded_headers(request: web.BaseRequest) -> CIMultiDict[str]:
    headers = end_to_end(request.headers, ["x-serverless-authorization"])
    headers.add("X-Forwarded-For", request.remote or HOST)
    headers["X-Forwarded-Proto"] = request.scheme
    return headers
