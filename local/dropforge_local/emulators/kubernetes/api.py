"""A cluster's API server: a loopback port for kubectl and the official client."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from dropforge_local.base.ports import HOST
from dropforge_local.iam.policy import current

from ..kit.background import stop_all
from . import discovery, forwarding, reviews
from .applying import apply
from .kinds import JOB, POD, SERVICE, SERVICE_ACCOUNT, Kind
from .kubelet import execution
from .kubelet.execution import ExecRequest
from .kubelet.logs import LogRequest
from .kubelet.probes import Command
from .objects import Objects, strict_error
from .patches import APPLY_PATCH, JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, apply_patch
from .paths import LARGEST_BODY, Target, flag, is_dry_run, number, parse_body, parse_delete, parse_path
from .permissions import refusal
from .refusals import Refusal, bad_request, not_emulated
from .selectors import parse_selector
from .shared import Shared
from .store import Object
from .tables import TABLE, accepted, render_metadata, render_metadata_list, render_table
from .watches import Page, Scope, read_page, watch

log = logging.getLogger(__name__)

RETURNED = (POD, SERVICE, SERVICE_ACCOUNT)  # a DELETE returns the object itself; for other kinds it returns a Status
LARGEST_MESSAGE = 16 * 2**20  # of a WebSocket
UNTYPED = ("log", "proxy", "exec", "portforward")  # their answers are no objects of the API
ORPHANS = (
    "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to remove them or "
    "set propagationPolicy=Orphan to suppress this warning"
)


class Node(Protocol):
    """The API server's access to running pods."""

    def read_log(self, pod: Object, request: LogRequest) -> AsyncIterator[bytes]:
        """A container's output. Refuses if it cannot be read."""

    async def forward(self, request: web.BaseRequest, target: Target) -> web.StreamResponse:
        """Forward a request to a pod, or to a pod of a service."""

    def command(self, pod: Object, request: ExecRequest) -> Command:
        """A command in a running container. Refuses if the container does not run."""

    def local_port(self, pod: Object, port: int) -> int | None:
        """The port of this machine for a port that a pod declares; None for other ports."""


class ApiServer:
    """Serves a cluster's objects over HTTPS."""

    def __init__(self, objects: Objects, port: int, shared: Shared, node: Node, tls: ssl.SSLContext) -> None:
        self.port = port
        self._tls = tls
        self._objects = objects
        self._store = objects.store
        self._shared = shared
        self._faults = shared.faults
        self._node = node

    async def start(self) -> None:
        """Listen. Raises OSError if the port is taken."""
        self._server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(self._server, shutdown_timeout=0.2)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, HOST, self.port, ssl_context=self._tls)
        await self._site.start()

    async def stop(self) -> None:
        """Stop listening and cut every connection, also after one of them raises.

        A TLS transport that is only closed waits 30 s for its client's goodbye. It is aborted before `cleanup` closes
        it, because asyncio cannot abort a TLS transport that was closed twice: the connection stays open (Python 3.11),
        or `abort` raises AttributeError (Python 3.12).
        """
        transports = [each.transport for each in self._server.connections if each.transport is not None]
        await stop_all(self._site.stop, *(partial(_abort, each) for each in transports), self._runner.cleanup)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except Refusal as refusal:
            return web.json_response(refusal.status(), status=refusal.code, headers=refusal.headers)
        except web.HTTPException:
            raise
        except Exception:
            log.exception("%s %s", request.method, request.path)
            failure = Refusal(500, "Internal error occurred: the emulator failed; its log has the traceback")
            return web.json_response(failure.status(), status=500)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in ("/healthz", "/livez", "/readyz"):
            return web.Response(text="ok")
        if not self._shared.authorize(request.headers):
            raise Refusal(401, "Unauthorized")
        self._shared.enter(request.headers)
        path = request.path.rstrip("/")
        if request.method == "GET" and (document := discovery.document(path)) is not None:
            return web.json_response(document)
        if request.method == "POST" and (kind := reviews.PATHS.get(path)):
            body = parse_body(await _read_body(request), content_type_of(request))
            return web.json_response(reviews.review(kind, body, self._refuse()), status=201)
        raw_path = request.rel_url.raw_path.rstrip("/")
        call = Call(request, parse_path(raw_path), self._shared.host.clock.now())
        self._shared.note(request.headers, self._store.cluster, call.verb, call.target.resource)
        self._check_permission(call)
        rule = self._faults.take_for(self._store.cluster, call.verb, call.target.kind.plural)
        await self._faults.suffer(rule, after_effect=False)
        if call.verb == "watch" or call.verb in UNTYPED:
            return await self._stream(call)
        answer = self._act(call, await _read_body(request))
        await self._store.db.durable()
        await self._faults.suffer(rule, after_effect=True)
        return answer

    def _check_permission(self, call: Call, verb: str = "") -> None:
        """Refuse what neither IAM nor a Role of this cluster grants to the account of this request."""
        refuse = self._refuse()
        if refuse is not None and (reason := refuse(call.target, verb or call.verb)):
            raise Refusal(403, reason)

    def _refuse(self) -> reviews.Refuse | None:
        """Why the account of this request may not do something; None for the owner."""
        if (account := current.get()) is None:
            return None
        has_roles = self._store.cluster in self._shared.standing
        return partial(refusal, account, self._store.cluster, has_roles=has_roles)

    def _act(self, call: Call, data: bytes) -> web.Response:
        if call.verb == "list":
            return self._list(call)
        if call.target.subresource == "scale":
            return self._scale(call, data)
        if call.verb == "get":
            return call.respond(self._objects.read(*call.key))
        action: dict[str, Callable[[Call, bytes], web.Response]] = {
            "create": self._create,
            "update": self._update,
            "patch": self._patch,
            "delete": self._delete,
            "deletecollection": self._delete_collection,
        }
        return action[call.verb](call, data)

    async def _stream(self, call: Call) -> web.StreamResponse:
        if call.verb == "watch":
            return await self._watch(call)
        if call.verb == "proxy":
            return await self._node.forward(call.request, call.target)
        pod = self._objects.read(*call.key)
        if call.verb == "exec":
            return await self._execute(call, pod)
        if call.verb == "portforward":
            return await self._forward_ports(call, pod)
        request = LogRequest.parse(call.query, self._shared.host.clock.now())
        return await call.stream(self._node.read_log(pod, request), "text/plain")

    async def _execute(self, call: Call, pod: Object) -> web.StreamResponse:
        request = ExecRequest.parse(call.query)
        command = self._node.command(pod, request)
        async with _upgraded(call.request, execution.PROTOCOLS) as socket:
            await execution.execute(socket, request, command)
        return socket

    async def _forward_ports(self, call: Call, pod: Object) -> web.StreamResponse:
        resolve = partial(self._node.local_port, pod)
        async with _upgraded(call.request, forwarding.PROTOCOLS) as socket:
            if socket.ws_protocol == forwarding.TUNNEL:
                await forwarding.tunnel(socket, resolve)
            else:
                await forwarding.channels(socket, forwarding.ports_of(call.query.getall("ports", ())), resolve)
        return socket

    def _list(self, call: Call) -> web.Response:
        limit = number(call.query, "limit") or 0
        page = read_page(
            self._store, call.scope, limit, call.query.get("continue", ""), call.query.get("resourceVersion", "")
        )
        return call.respond_list(page)

    async def _watch(self, call: Call) -> web.StreamResponse:
        events = watch(
            self._store,
            call.scope,
            call.query.get("resourceVersion", ""),
            float(number(call.query, "timeoutSeconds") or 0),
            bookmarks=flag(call.query, "allowWatchBookmarks"),
            initial=flag(call.query, "sendInitialEvents"),
        )
        return await call.stream(call.lines(events), "application/json")

    def _create(self, call: Call, data: bytes) -> web.Response:
        target = call.target
        if target.name or target.subresource:
            raise Refusal(405, "the server does not allow this method on the requested resource")
        item = self._parse(call, parse_body(data, call.content_type))
        created = self._write(call, lambda: self._objects.create(target.kind, target.namespace, item))
        return call.respond(created, 201)

    def _update(self, call: Call, data: bytes) -> web.Response:
        target = call.target
        item = self._parse(call, parse_body(data, call.content_type))
        if target.subresource == "finalize":
            return call.respond(self._finalize(call, item))
        status = target.subresource == "status"

        def work() -> Object:
            return self._objects.update(*call.key, item, status=status, manager=call.manager)

        return call.respond(self._write(call, work))

    def _finalize(self, call: Call, item: Object) -> Object:
        """Change a namespace's finalizers: they are in the spec, and only this subresource changes them."""

        def work() -> Object:
            namespace = self._objects.read(*call.key)
            namespace["spec"] = item.get("spec", {})
            return self._objects.settle(call.target.kind, namespace)

        finalized: Object = self._write(call, work)
        return finalized

    def _patch(self, call: Call, data: bytes) -> web.Response:
        target, patch = call.target, parse_body(data, call.content_type)
        if call.content_type == APPLY_PATCH:
            return self._apply(call, patch)

        def work() -> Object:
            current = self._objects.read(*call.key)
            patched = apply_patch(call.content_type, current, patch, target.kind.schema)
            if call.content_type != JSON_PATCH and not _names_version(patch):
                patched = _without_version(patched)
            item = self._parse(call, patched)
            status = target.subresource == "status"
            return self._objects.update(*call.key, item, status=status, manager=call.manager)

        return call.respond(self._write(call, work))

    def _apply(self, call: Call, config: Any) -> web.Response:
        """Server-side apply, which creates an object that does not exist."""
        target = call.target
        if target.subresource:
            raise not_emulated(f"server-side apply of {target.subresource}")
        manager, force = call.query.get("fieldManager", ""), flag(call.query, "force")
        current = self._store.find(*call.key)
        if current is None:
            self._check_permission(call, "create")

        def work() -> Object:
            applied, owners = apply(target.kind, current, config, manager, force=force)
            if not _names_version(config):
                applied = _without_version(applied)
            item = self._parse(call, applied)
            if item["metadata"].get("name", "") != target.name:
                raise bad_request(f"metadata.name is {item['metadata'].get('name')!r}; expected {target.name!r}")
            if current is None:
                return self._objects.create(target.kind, target.namespace, item, owners)
            return self._objects.update(*call.key, item, owners=owners)

        return call.respond(self._write(call, work), 200 if current else 201)

    def _delete(self, call: Call, data: bytes) -> web.Response:
        target = call.target
        body = parse_body(data, call.content_type)
        options = parse_delete(body, call.query)
        if target.kind == JOB and not options.propagation:
            call.warnings.append(ORPHANS)
        item, is_deleted = self._write(
            call, lambda: self._objects.delete(target.kind, target.namespace, target.name, options), body
        )
        if not is_deleted or target.kind in RETURNED:
            return call.respond(item)
        details = {"name": target.name, "kind": target.kind.plural, "uid": item["metadata"]["uid"]}
        if target.kind.group:
            details["group"] = target.kind.group
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        return call.respond(status)

    def _delete_collection(self, call: Call, data: bytes) -> web.Response:
        body = parse_body(data, call.content_type)
        options = parse_delete(body, call.query)
        if not call.target.namespace and call.target.kind.namespaced:
            raise Refusal(405, "the server does not allow this method on the requested resource")

        def work() -> Page:
            page = read_page(self._store, call.scope, 0, "", "")
            for item in page.items:
                self._objects.delete(call.target.kind, call.target.namespace, item["metadata"]["name"], options)
            return page

        return call.respond_list(self._write(call, work, body))

    def _scale(self, call: Call, data: bytes) -> web.Response:
        """autoscaling/v1 Scale of a Deployment or ReplicaSet."""
        target = call.target
        if call.verb not in ("get", "update", "patch"):
            raise Refusal(405, "the server does not allow this method on the requested resource")

        def work() -> Object:
            item = self._objects.read(*call.key)
            if call.verb == "get":
                return _scale_of(item)
            body = parse_body(data, call.content_type)
            # A Scale has no lists, so a strategic merge equals a JSON merge.
            kind = MERGE_PATCH if call.content_type == STRATEGIC_PATCH else call.content_type
            scale = body if call.verb == "update" else apply_patch(kind, _scale_of(item), body, "")
            replicas = (scale.get("spec") or {}).get("replicas", 0)
            version = (scale.get("metadata") or {}).get("resourceVersion") if call.verb == "update" else None
            item["metadata"]["resourceVersion"] = version or item["metadata"]["resourceVersion"]
            item["spec"]["replicas"] = replicas
            parsed, _ = self._objects.parse(target.kind, item)
            return _scale_of(self._objects.update(*call.key, parsed, manager=call.manager))

        return call.respond(self._write(call, work))

    def _parse(self, call: Call, body: Any) -> Object:
        """The parsed manifest. Refuses unknown fields unless the client asks for a warning or for nothing."""
        mode = call.query.get("fieldValidation", "Strict")
        item, unknown = self._objects.parse(call.target.kind, body)
        if unknown and mode not in ("Warn", "Ignore"):
            raise strict_error(call.target.kind, unknown)
        if mode == "Warn":
            call.warnings += [f'unknown field "{name}"' for name in unknown]
        return item

    def _write(self, call: Call, work: Callable[[], Any], body: Any = None) -> Any:
        if is_dry_run(call.query, body):
            return self._objects.dry_run(work)
        with self._store.db.transaction():
            return work()


class Call:
    """A request: its target, and how to answer it."""

    def __init__(self, request: web.BaseRequest, target: Target, now: float) -> None:
        self.request = request
        self.target = target
        self.query = request.query
        self.content_type = content_type_of(request)
        self.warnings: list[str] = []
        self._now = now
        self.verb = self._verb()
        self._form = "" if self.verb in UNTYPED else accepted(request.headers.get("Accept", ""))

    @property
    def key(self) -> tuple[Kind, str, str]:
        return self.target.kind, self.target.namespace, self.target.name

    @property
    def manager(self) -> str:
        """Who writes: the query says so, or the first word of the client's name."""
        return self.query.get("fieldManager") or self.request.headers.get("User-Agent", "").partition("/")[0]

    @property
    def scope(self) -> Scope:
        fields = self.query.get("fieldSelector", "")
        if self.target.name:  # a watch of a single object, as old clients request it
            fields = f"metadata.name={self.target.name}"
        selector = parse_selector(self.target.kind, self.query.get("labelSelector", ""), fields)
        return Scope(self.target.kind, self.target.namespace, selector)

    def respond(self, item: Object, status: int = 200) -> web.Response:
        body = self._formed(item) if item.get("kind") == self.target.kind.name else item
        return web.json_response(body, status=status, headers=self._headers())

    def respond_list(self, page: Page) -> web.Response:
        kind = self.target.kind
        metadata: Object = {"resourceVersion": str(page.revision)}
        if page.following:
            metadata["continue"] = page.following
            if page.remaining is not None:
                metadata["remainingItemCount"] = page.remaining
        if self._form == TABLE:
            return web.json_response(render_table(kind, page.items, self._now, metadata))
        items = page.items
        if self._form:
            return web.json_response(render_metadata_list(items, metadata), headers=self._headers())
        if kind.schema:  # as in the real API, the items of a typed list do not repeat their type
            items = [{key: item[key] for key in item if key not in ("kind", "apiVersion")} for item in items]
        body = {"kind": f"{kind.name}List", "apiVersion": kind.api_version, "metadata": metadata, "items": items}
        return web.json_response(body, headers=self._headers())

    async def lines(self, events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        async for event in events:
            if event["type"] not in ("BOOKMARK", "ERROR"):
                event = {**event, "object": self._formed(event["object"])}
            yield json.dumps(event).encode() + b"\n"

    async def stream(self, chunks: AsyncIterator[bytes], content_type: str) -> web.StreamResponse:
        """Stream `chunks`. A refusal before the first chunk is an ordinary answer; a later error ends the stream."""
        response = web.StreamResponse(headers={"Content-Type": content_type, **self._headers()})
        first = asyncio.ensure_future(_first(chunks))
        try:
            # An empty watch has no first event, but the client must receive the response's head.
            await asyncio.wait([first], timeout=0.05)
            if first.done():
                first.result()
            await response.prepare(self.request)
            if (chunk := await first) is not None:
                await response.write(chunk)
                async for chunk in chunks:
                    await response.write(chunk)
            await response.write_eof()
        except ConnectionResetError:
            pass  # the client has disconnected
        finally:
            first.cancel()
        return response

    def _formed(self, item: Object) -> Object:
        """An object in the form that the client accepts."""
        if self._form == TABLE:
            version = {"resourceVersion": item["metadata"].get("resourceVersion", "")}
            return render_table(self.target.kind, [item], self._now, version)
        return render_metadata(item) if self._form else item

    def _verb(self) -> str:
        if self.target.subresource in UNTYPED:
            return self.target.subresource
        named = bool(self.target.name)
        method = self.request.method
        if method == "GET" and flag(self.query, "watch"):
            return "watch"
        verbs = {
            "GET": "get" if named else "list",
            "POST": "create",
            "PUT": "update" if named else "",
            "PATCH": "patch" if named else "",
            "DELETE": "delete" if named else "deletecollection",
        }
        if not verbs.get(method):
            raise Refusal(405, "the server does not allow this method on the requested resource")
        return verbs[method]

    def _headers(self) -> dict[str, str]:
        if not self.warnings:
            return {}
        texts = [warning.replace("\\", "\\\\").replace('"', '\\"') for warning in self.warnings]
        return {"Warning": ", ".join(f'299 - "{text}"' for text in texts)}


def content_type_of(request: web.BaseRequest) -> str:
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


@asynccontextmanager
async def _upgraded(request: web.BaseRequest, protocols: Sequence[str]) -> AsyncIterator[web.WebSocketResponse]:
    """A WebSocket with the client. Refuses SPDY with 501, and other requests with 400."""
    wanted = [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
    if request.headers.get("Upgrade", "").lower().startswith("spdy"):
        raise not_emulated("an upgrade to SPDY (kubectl before 1.31)")
    socket = web.WebSocketResponse(protocols=protocols, max_msg_size=LARGEST_MESSAGE, compress=False)
    if not socket.can_prepare(request) or not set(wanted) & set(protocols):
        raise bad_request(f"Upgrade request required: a WebSocket with one of the protocols {', '.join(protocols)}")
    await socket.prepare(request)
    try:
        yield socket
    finally:
        await socket.close()


async def _abort(transport: asyncio.Transport) -> None:
    transport.abort()


async def _read_body(request: web.BaseRequest) -> bytes:
    data = b""
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > LARGEST_BODY:
            raise Refusal(413, f"Request entity too large: limit is {LARGEST_BODY}")
    return data


async def _first(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


def _names_version(patch: Object) -> bool:
    metadata = patch.get("metadata")
    return isinstance(metadata, dict) and "resourceVersion" in metadata


def _without_version(patched: Object) -> Object:
    """A copy without resourceVersion, for a patch without a version; `patched` may share parts with the original."""
    metadata = patched.get("metadata")
    return {**patched, "metadata": {**metadata, "resourceVersion": None}} if isinstance(metadata, dict) else patched


def _scale_of(item: Object) -> Object:
    metadata = {key: item["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
    metadata["creationTimestamp"] = item["metadata"]["creationTimestamp"]
    labels = item["spec"]["selector"].get("matchLabels", {})
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": metadata,
        "spec": {"replicas": item["spec"]["replicas"]},
        "status": {
            "replicas": item.get("status", {}).get("replicas", 0),
            "selector": ",".join(f"{key}={value}" for key, value in labels.items()),
        },
    }
