"""Serves every emulator on loopback ports: HTTP (REST, callbacks), gRPC, and HTTPS for clients that refuse HTTP."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from typing import Any, Protocol, TypeVar

import grpc
from aiohttp import web

from .browsers import refuse_pages
from .db import Database
from .errors import ApiError
from .lifetimes import KEEP_ALIVE_SECONDS
from .peers import Strangers
from .ports import HOST, stack_port
from .recording import CALLERS, Recorder

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")
MAX_BODY_BYTES = 5 * 2**30
ACCEPT_ROUNDS = 3  # of the event loop, from the accept of a connection to its protocol (asyncio.selector_events)


class Emulator(Protocol):
    """One emulated API. All methods run on the server's event loop."""

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """HTTP routes, by the paths of the real API."""

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        """gRPC services; empty for an API that clients reach over REST only."""

    async def start(self) -> None:
        """Start background work; normal start is also recovery."""

    async def stop(self) -> None:
        """Stop background work; state stays in the database."""


@web.middleware
async def render_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn ApiError into Google's JSON; answer 501 with an explanation where no emulator has a route."""
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.to_json(), status=error.http_status)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
        refusal = ApiError("UNIMPLEMENTED", f"{request.method} {request.path} is not emulated by the local stack")
        return web.json_response(refusal.to_json(), status=501)
    except web.HTTPException:
        raise
    except Exception:
        log.exception("%s %s", request.method, request.path)
        failure = ApiError("INTERNAL", "the emulator failed; its log has the traceback")
        return web.json_response(failure.to_json(), status=500)


class Callers(Protocol):
    """Which account a request acts as."""

    def enter(self, headers: Mapping[str, str], address: str, path: str = "") -> None:
        """Let the rest of this request act as its account; `address` is of CALLERS or "". Raises ApiError."""


class Server:
    """The emulators' HTTP and gRPC listeners. Port 0 takes a free port; read the result after `start`.

    `is_open`: other users of the machine may call, too (peers.py).
    With a `recorder` or `callers`, each caller of CALLERS has its own HTTP and gRPC port: `http_ports`, `grpc_ports`.
    """

    def __init__(
        self,
        emulators: Sequence[Emulator],
        http_port: int = 0,
        grpc_port: int = 0,
        recorder: Recorder | None = None,
        callers: Callers | None = None,
        *,
        is_open: bool = False,
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        self.emulators = emulators
        self.http_port = http_port
        self.grpc_port = grpc_port
        self.recorder = recorder
        self.callers = callers
        self.strangers = None if is_open else Strangers()
        self.keep_alive_seconds = keep_alive_seconds
        self._addresses: dict[int, str] = {}  # the caller of each HTTP port of its own
        self.kept_ports: dict[str, tuple[int, int]] = {}  # HTTP and gRPC port of callers, of an earlier start
        self.http_ports: dict[str, int] = {}
        self.grpc_ports: dict[str, int] = {}
        self.tls: ssl.SSLContext | None = None  # with it, the HTTP routes also have a port for HTTPS: `tls_port`
        self.tls_port = 0
        self.before_start: Callable[[], None] = lambda: None  # called when the ports are known
        self.durable: Callable[[], Awaitable[None]] = _nothing  # every answer waits for it

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{HOST}:{self.grpc_port}"

    def addresses(self, caller: str) -> tuple[str, str]:
        """The URL and the gRPC address that identify a caller; the common addresses when nothing is recorded."""
        http, grpc = self.http_ports.get(caller, self.http_port), self.grpc_ports.get(caller, self.grpc_port)
        return f"http://{HOST}:{http}", f"{HOST}:{grpc}"

    def stranger_at(self, peer: str, caller: str) -> str | None:
        """Why the gRPC client `peer`, at the port of a caller, may not call; None if it may."""
        if self.strangers is None:
            return None
        return self.strangers.of_grpc(peer, self.grpc_ports.get(caller, self.grpc_port), HOST)

    async def start(self) -> None:
        """Bind both ports, then start the emulators. Raises OSError when a port is taken."""
        recording = [self.recorder.middleware(self._addresses)] if self.recorder else []
        entering = [self._entering()] if self.callers else []
        own = [self.strangers.middleware] if self.strangers else []
        middlewares = [*own, refuse_pages, *recording, render_errors, *entering]
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=middlewares)
        app.on_response_prepare.append(self._hold_back)
        for emulator in self.emulators:
            app.router.add_routes(emulator.routes())
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=2, keepalive_timeout=self.keep_alive_seconds
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self._port(self.http_port))
        await site.start()
        self.http_port = self._runner.addresses[0][1]
        if self.tls is not None:
            await web.TCPSite(self._runner, HOST, self._port(0), ssl_context=self.tls).start()
            self.tls_port = self._runner.addresses[-1][1]
        server, self.grpc_port = self._bind_grpc("", self.grpc_port)
        self._grpc_servers = [server]
        for caller in CALLERS if self.recorder or self.callers else ():
            http, grpc_port = self.kept_ports.get(caller, (0, 0))
            self.http_ports[caller] = await self._bind_http(caller, http)
            self._addresses[self.http_ports[caller]] = caller
            try:
                server, self.grpc_ports[caller] = self._bind_grpc(caller, grpc_port)
            except OSError as error:
                _tell_moved(caller, error)
                server, self.grpc_ports[caller] = self._bind_grpc(caller, 0)
            self._grpc_servers.append(server)
        self.before_start()
        for server in self._grpc_servers:
            await server.start()
        for emulator in self.emulators:
            await emulator.start()

    async def stop(self) -> None:
        """Stop the emulators, the last one first, then the listeners. Raises an emulator's error after all stopped."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop_http)
            stack.push_async_callback(self._stop_grpc)
            for emulator in self.emulators:
                stack.push_async_callback(emulator.stop)

    async def _stop_http(self) -> None:
        """Stop accepting connections, then close all.

        A connection whose accept coincides with the close of its listener would stay open
        (https://github.com/python/cpython/issues/109564).
        """
        for site in self._runner.sites:
            server: Any = site._server  # None if its port was taken
            for listener in server.sockets if server else ():
                asyncio.get_running_loop().remove_reader(listener.fileno())
        for _ in range(ACCEPT_ROUNDS):
            await asyncio.sleep(0)
        await self._runner.cleanup()

    async def _stop_grpc(self) -> None:
        stops = [asyncio.create_task(server.stop(grace=0.5)) for server in self._grpc_servers]
        await asyncio.wait(stops)  # the listeners close together, and all of them also if one raises
        for stop in stops:
            stop.result()

    def _entering(self) -> Any:
        """A middleware that lets each request act as its account."""

        @web.middleware
        async def enter(request: web.Request, handler: Handler) -> web.StreamResponse:
            assert self.callers is not None
            port = request.transport.get_extra_info("sockname")[1] if request.transport else 0
            self.callers.enter(request.headers, self._addresses.get(port, ""), request.path)
            return await handler(request)

        return enter

    def _port(self, port: int) -> int:
        """The given port, or a free port that no listener has from the last start: some of them are bound later."""
        return stack_port(port, {self.http_port, self.grpc_port, *chain.from_iterable(self.kept_ports.values())})

    async def _bind_http(self, caller: str, port: int) -> int:
        """Open a caller's port, or another port if a program has taken it since the last start."""
        try:
            await web.TCPSite(self._runner, HOST, self._port(port)).start()
        except OSError as error:
            _tell_moved(caller, error)
            await web.TCPSite(self._runner, HOST, self._port(0)).start()
        return int(self._runner.addresses[-1][1])

    def _bind_grpc(self, caller: str, port: int) -> tuple[grpc.aio.Server, int]:
        recording = [self.recorder.interceptor(caller)] if self.recorder and caller else []
        server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", 32 * 2**20),
            ],
            interceptors=[*recording, _Around(self, caller)],
        )
        for emulator in self.emulators:
            if handlers := emulator.grpc_handlers():
                server.add_generic_rpc_handlers(tuple(handlers))
        port = self._port(port)
        try:
            return server, server.add_insecure_port(f"{HOST}:{port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {HOST}:{port}: {error}") from error

    async def _hold_back(self, request: web.Request, response: web.StreamResponse) -> None:
        """Send no answer before all commits are durable: the answer may report them."""
        await self.durable()


class _Around(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Like `Server._entering` and `Server._hold_back`, for gRPC."""

    def __init__(self, server: Server, address: str) -> None:
        self._server = server
        self._address = address

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None

        async def enter(context: Any) -> None:
            if problem := self._server.stranger_at(context.peer(), self._address):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, problem)
            if (callers := self._server.callers) is not None:
                try:
                    callers.enter(dict(details.invocation_metadata), self._address)
                except ApiError as error:
                    await context.abort(getattr(grpc.StatusCode, error.status), error.message)

        async def answer(request: Any, context: Any) -> Any:
            await enter(context)
            try:
                return await handler.unary_unary(request, context)
            finally:
                await self._server.durable()

        async def stream(requests: Any, context: Any) -> AsyncIterator[Any]:
            await enter(context)
            async for response in handler.stream_stream(requests, context):
                await self._server.durable()
                yield response

        coders = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(answer, *coders)
        return grpc.stream_stream_rpc_method_handler(stream, *coders)


def _tell_moved(caller: str, error: OSError) -> None:
    # A container of the earlier start still calls the old port. It fails, and the control plane tries it again.
    log.warning("the port of %s is taken (%s); it gets another port", caller, error)


async def _nothing() -> None:
    """For emulators without a database, or that need no durability."""


class BackgroundServer:
    """A server on the event loop of a separate thread, for tests and benchmarks that are not asynchronous.

    `build` runs on that thread (SQLite connections belong to it) and returns the emulators. The databases that it opens
    are closed at the end.
    """

    def __init__(
        self, build: Callable[[], Sequence[Emulator]], callers: Callers | None = None, *, is_open: bool = False
    ) -> None:
        self._build = build
        self._callers = callers
        self._is_open = is_open
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        self.server: Server = self.call(self._start())
        return self.server

    def call(self, work: Awaitable[T], timeout: float = 60) -> T:
        """Run a coroutine on the server's loop and return its result."""

        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout)

    def __exit__(self, *exc: object) -> None:
        try:
            self.call(self.server.stop())
        finally:
            self.call(_end_other_tasks())
            self._loop.call_soon_threadsafe(Database.close_all_of_this_thread)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    async def _start(self) -> Server:
        server = Server(self._build(), callers=self._callers, is_open=self._is_open)
        await server.start()
        return server


async def _end_other_tasks() -> None:
    """End the tasks that emulators leave behind, as asyncio.run does: an fsync may outlast its waiters."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
