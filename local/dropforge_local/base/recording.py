"""Tells callers apart, and records their calls: a stack with `record` in its config writes calls.jsonl.

The trainer's containers, the server's containers and the functions each reach the emulators at separate addresses. All
functions are threads of one process here, so each of their requests also carries the name of its function in HEADER.
Calls to the stack's common address come from users and are not recorded. dropforge_local.iam reads the same marks.
"""

from __future__ import annotations

import contextvars
import http.client
import json
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web

from .identity import BOUNDED, Identity

HEADER = "x-dropforge-caller"
LOOPBACK = ("127.0.0.1", "localhost")
FUNCTIONS, TRAINER, SERVER = "functions", "trainer", "server"
CALLERS = (FUNCTIONS, TRAINER, SERVER)
FILE = "calls.jsonl"
METADATA = "/computeMetadata/"  # a machine's own server answers these calls in the cloud
INVOCATION = "invocation"  # the call that a function itself is; every other call is a request that a caller sends
_ACCOUNT = re.compile(rb'"([\w.-]+@[\w-]+\.iam\.gserviceaccount\.com)"')

caller: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="")


class Recorder:
    """Writes a line of JSON for each call: caller, call, status, and facts that decide which permission it needs.

    It never writes a sent value, because secrets are sent too: only names of fields, and service accounts. `identity`
    tells the function that has lent a container its token.
    """

    def __init__(self, path: Path, identity: Identity | None = None) -> None:
        self._file = path.open("a", buffering=1)
        self._identity = identity

    def note(self, caller: str, call: str, status: int = 200, **facts: Any) -> None:
        self._file.write(json.dumps({"caller": caller, "call": call, "status": status, **facts}) + "\n")

    def close(self) -> None:
        self._file.close()

    def note_endpoint(self, headers: Mapping[str, str]) -> None:
        """Record a request to a Cloud Run service at the service's address."""
        if name := headers.get(HEADER, ""):
            self.note(name, "invoke")

    def note_kubernetes(self, headers: Mapping[str, str], cluster: str, verb: str, resource: str) -> None:
        """Record a Kubernetes request; `resource` as a Role names it, with its group: batch/jobs."""
        if name := headers.get(HEADER, ""):
            self.note(name, f"kubernetes {verb}", cluster=cluster, resource=resource)

    def middleware(self, callers: Mapping[int, str]) -> Any:
        """A middleware for an aiohttp application; `callers` maps its ports to callers and may grow later."""

        @web.middleware
        async def record(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            port = request.transport.get_extra_info("sockname")[1] if request.transport else 0
            name = self._lender(request.headers) or request.headers.get(HEADER) or callers.get(port)
            if not name or request.path.startswith(METADATA):
                return await handler(request)
            # The body of an upload is a stream, and may be large.
            body = b"" if "/storage/" in request.path else await request.read()
            response = await handler(request)
            stored = {"object": _name_in(response)} if "/upload/" in request.path else {}
            facts = {
                "fields": _fields_of(body),
                "acts_as": [account.decode() for account in set(_ACCOUNT.findall(body))],
            }
            self.note(name, f"{request.method} {request.raw_path}", response.status, **facts, **stored)
            return response

        return record

    def _lender(self, headers: Mapping[str, str]) -> str:
        """The function whose account a token within a boundary has; "" for another token."""
        claims = self._identity.claims(headers) if self._identity else None
        return claims.caller if claims and claims.kind == BOUNDED else ""

    def interceptor(self, endpoint: str) -> grpc.aio.ServerInterceptor:
        """An interceptor for the gRPC server of the caller `endpoint`."""
        return _Interceptor(self, endpoint)


class _Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, recorder: Recorder, endpoint: str) -> None:
        self._recorder, self._endpoint = recorder, endpoint

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.unary_unary is None:
            return handler
        name = dict(details.invocation_metadata).get(HEADER) or self._endpoint

        async def serve(request: Any, context: Any) -> Any:
            on = getattr(request, "topic", "") or getattr(request, "parent", "") or getattr(request, "name", "")
            self._recorder.note(name, details.method, on=on)
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)


def tell_callers() -> None:
    """Make every HTTP and gRPC request of this process carry the value of `caller` with which its thread began."""
    threads: Any = threading.Thread
    connections: Any = http.client.HTTPConnection
    start, putrequest, insecure_channel = threads.start, connections.putrequest, grpc.insecure_channel

    def start_in_context(thread: Any) -> None:
        thread.run = partial(contextvars.copy_context().run, thread.run)
        start(thread)

    def put_request(connection: Any, *args: Any, **options: Any) -> None:
        putrequest(connection, *args, **options)
        if connection.host in LOOPBACK:  # nobody outside of this machine learns it
            connection.putheader(HEADER, caller.get())

    threads.start, connections.putrequest = start_in_context, put_request
    grpc.insecure_channel = lambda *args, **options: grpc.intercept_channel(insecure_channel(*args, **options), _Tell())


class _Tell(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        details = details._replace(metadata=[*(details.metadata or ()), (HEADER, caller.get())])
        return continuation(details, request)


def _name_in(response: web.StreamResponse) -> str:
    """The name of the uploaded object: only the body of a multipart upload has it."""
    body = response.body if isinstance(response, web.Response) else None
    return str(json.loads(body).get("name", "")) if isinstance(body, bytes) and body.startswith(b"{") else ""


def _fields_of(body: bytes) -> list[str]:
    """The names of all fields of a JSON body, at any depth."""

    def walk(node: Any) -> set[str]:
        if isinstance(node, dict):
            return set(node).union(*map(walk, node.values()))
        return set().union(*map(walk, node)) if isinstance(node, list) else set()

    try:
        return sorted(walk(json.loads(body)))
    except ValueError:
        return []
