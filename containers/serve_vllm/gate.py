"""A proxy in front of the engines of a machine without a GPU: readiness, the key, and every error in OpenAI's format.

All else is vLLM's own: its routes, its checks, its queue. So a laptop shows what the cloud serves. `transformers serve`
lacks much of it, and has a gate that makes up for it (standin_gate.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from hmac import compare_digest
from io import BytesIO

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict
from yarl import URL

from dropforge.base.log import log

from .openai_errors import Refused, errors_as_openai, translated

POLL_SECONDS = 0.05
PROBE_SECONDS = 60.0
LARGEST_REQUEST = 32 * 2**20  # bytes; Cloud Run's limit for HTTP/1 (https://cloud.google.com/run/quotas)
WITHOUT_KEY = ("/health", "/metrics")
# Routes of vLLM 0.29 to 0.32 that change or stop the server, or look into it. vLLM has most of them only if a flag or a
# variable asks for it (vllm/entrypoints/{serve,rl,scale_out}); a client of an endpoint gets none of them.
PRIVATE = frozenset({
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters",
    "/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory",
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache",
    "/start_profile", "/stop_profile", "/collective_rpc", "/server_info", "/kv_event_sources",
    "/pause", "/resume", "/is_paused", "/abort_requests",
    "/inference/v1/abort_requests",
    "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
    "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version",
    "/weight_info", "/weight_checker", "/get_world_size",
    "/scale_elastic_ep", "/is_scaling_elastic_ep", "/fault_tolerance",
})  # fmt: skip
# Headers of one connection (RFC 9110, section 7.6.1), and those that aiohttp writes itself.
_NOT_RELAYED = frozenset({
    "accept-encoding", "authorization", "connection", "content-encoding", "content-length", "date", "expect",
    "keep-alive", "proxy-authenticate", "proxy-authorization", "server", "te", "trailer", "transfer-encoding",
    "upgrade",
})  # fmt: skip


class Gate:
    """A proxy of vLLM at `upstream`, which knows its model and its adapters by the names that clients use.

    /health answers 200 only after a real completion: an engine can report health and fail every request.
    """

    def __init__(self, upstream: str, served_name: str, key: str = "", ends_connections: bool = False) -> None:
        self.ready = asyncio.Event()
        self.upstream = upstream
        self.served_name = served_name
        self._authorization = f"Bearer {key}".encode() if key else b""
        self._ends_connections = ends_connections
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        application = web.Application(client_max_size=LARGEST_REQUEST, middlewares=[errors_as_openai, self._guarded])
        application.router.add_get("/health", self._health)
        self.add_routes(application.router)
        application.cleanup_ctx.append(self._connected)
        if self._ends_connections:
            application.on_response_prepare.append(_end_connection)
        return application

    def runner(self, shutdown_timeout: float) -> web.AppRunner:
        """The server of the application. A client that leaves cancels its request, in the engine too."""
        return web.AppRunner(
            self.application(), access_log=None, shutdown_timeout=shutdown_timeout, handler_cancellation=True
        )

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_route("*", "/{path:.*}", self._pass)

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the application has started"
        return self._session

    @property
    def engine_model(self) -> str:
        """The engine's name of the model."""
        return self.served_name

    async def probe(self) -> None:
        """Wait for the engine and its first completion, then set `ready`. Raises RuntimeError on failure."""
        while not await self._is_up():
            await asyncio.sleep(POLL_SECONDS)
        body = {"model": self.engine_model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        timeout = aiohttp.ClientTimeout(total=PROBE_SECONDS)
        async with self.session.post(f"{self.upstream}/v1/chat/completions", json=body, timeout=timeout) as response:
            text = await response.text()
            if response.status != 200 or "choices" not in text:
                raise RuntimeError(f"the engine is up but its first completion failed: {response.status} {text[:500]}")
        self.ready.set()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Demand the key, then that the model is loaded.

        vLLM's --api-key guards the paths below /v1 alone, and vLLM completes texts at others, too (/invocations).
        """
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        is_free = not self._authorization or request.path in WITHOUT_KEY
        if not is_free and not compare_digest(given, self._authorization):
            raise Refused("the request has no valid key; expected Authorization: Bearer KEY", status=401)
        if request.path != "/health" and not self.ready.is_set():
            raise Refused("the model is still loading; expected 200 from /health first", status=503)
        return await handler(request)

    async def _connected(self, application: web.Application) -> AsyncIterator[None]:
        # The engine closes a connection after an error, without saying so: the next request would find it closed.
        connector, timeout = aiohttp.TCPConnector(force_close=True, limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            self._session = session
            yield

    async def _is_up(self) -> bool:
        try:
            async with self.session.get(f"{self.upstream}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def _health(self, request: web.Request) -> web.Response:
        if not self.ready.is_set():
            return web.json_response({"status": "starting"}, status=503)
        if not await self._is_up():
            return web.json_response({"status": "the engine is down"}, status=503)
        return web.json_response({"status": "ok"})

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        """vLLM's own answer to the request."""
        url = URL(f"{self.upstream}{request.rel_url.raw_path_qs}", encoded=True)
        if is_private(url.path):
            raise Refused(f"{url.path} is an administrative route of vLLM, which clients do not get", status=404)
        body = await request.read()
        async with self.session.request(
            request.method,
            url,
            headers=relayed_headers(request.headers),
            data=BytesIO(body) if body else None,
            allow_redirects=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        ) as answer:
            if answer.status >= 400:
                return translated(answer.status, await answer.text())
            if answer.content_type == "text/event-stream":
                return await stream(request, answer.content.iter_any(), relayed_headers(answer.headers))
            content, headers = await answer.read(), relayed_headers(answer.headers)
            return web.Response(status=answer.status, body=content, headers=headers)


def is_private(path: str) -> bool:
    """Whether the path, or one that it is below, is in PRIVATE."""
    return any(path == each or path.startswith(f"{each}/") for each in PRIVATE)


def relayed_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_RELAYED)


async def stream(request: web.Request, chunks: AsyncIterator[bytes], headers: Mapping[str, str]) -> web.StreamResponse:
    """Send the chunks of an answer as they come.

    If the engine ends an answer early, the connection ends without the answer's end: the status 200 has been sent, and
    a second response would look like a part of the answer.
    """
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    try:
        async for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
    except Exception as error:  # noqa: BLE001  (a ClientError of either side, or a chunk that is no JSON)
        log(f"an answer ended early: {type(error).__name__}", stage="serve", severity="WARNING")
        if request.transport is not None:
            request.transport.close()
    return response


async def _end_connection(request: web.Request, response: web.StreamResponse) -> None:
    response.force_close()
    response.headers["Connection"] = "close"  # aiohttp has made its own headers before it calls this
