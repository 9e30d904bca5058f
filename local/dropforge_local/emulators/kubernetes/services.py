"""Services: a local port for each port of a service, connected to a ready pod; and the API server's proxy paths."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from dropforge_local.base.ports import HOST

from ..kit.background import Background
from ..kit.relay import end_to_end, relay
from .config import KubernetesConfig
from .controllers.owned import is_finished, is_ready
from .kinds import POD, SERVICE
from .kubelet.environment import port_number
from .paths import Target
from .ports import Ports
from .refusals import Refusal, not_found
from .store import Change, Object, Store

log = logging.getLogger(__name__)

URLS = "local.dropforge/urls"  # annotation: {"8000": "http://127.0.0.1:19000"}


class Services:
    """A cluster's services. A cluster IP is only a name here; an annotation gives the service's local address."""

    def __init__(self, store: Store, ports: Ports, config: KubernetesConfig, session: aiohttp.ClientSession) -> None:
        self._store = store
        self._ports = ports
        self._config = config
        self._session = session
        self._turns = itertools.count()
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._background = Background("services")
        self._connections: set[asyncio.Task[Any]] = set()
        self._lock = asyncio.Lock()

    def start(self) -> None:
        self._background.spawn(self._align())

    async def stop(self) -> None:
        await self._background.stop()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    def on_change(self, change: Change) -> None:
        if change.kind == SERVICE:
            self._background.spawn(self._align())

    def listening(self) -> list[int]:
        """The open local ports."""
        return sorted(server.sockets[0].getsockname()[1] for server in self._servers.values() if server.sockets)

    async def forward(self, request: web.BaseRequest, target: Target) -> web.StreamResponse:
        """Serve …/services/NAME[:PORT]/proxy/… and …/pods/NAME[:PORT]/proxy/…."""
        name, _, port = target.name.removeprefix("http:").partition(":")
        item = self._store.find(target.kind, target.namespace, name)
        if item is None:
            raise not_found(target.kind, name)
        local = self._pod_port(item, port) if target.kind == POD else self._service_port(item, port)
        if local is None:
            raise Refusal(503, f'no endpoints available for service "{name}"')
        query = f"?{request.query_string}" if request.query_string else ""
        url = URL(f"http://{HOST}:{local}/{target.rest}{query}", encoded=True)
        try:
            return await self._relay(request, url)
        except aiohttp.ClientConnectionError as error:
            raise Refusal(503, f"error trying to reach service: {error}") from error

    async def _align(self) -> None:
        """Listen for exactly the services that exist."""
        async with self._lock:
            wanted: dict[tuple[str, int], Object] = {}
            services = self._store.items(SERVICE)
            for service in services:
                if service["spec"].get("clusterIP") != "None" and service["spec"].get("selector"):
                    wanted |= {(_owner(service), port["port"]): service for port in service["spec"].get("ports", ())}
            for key in [key for key in self._servers if key not in wanted]:
                self._servers.pop(key).close()
            for owner in self._ports.owners(self._store.cluster) - {_owner(service) for service in services}:
                if "/" in owner:  # the owner is a service; pods are owners by uid
                    self._ports.release(self._store.cluster, owner)
            for key, service in wanted.items():
                if key not in self._servers:
                    await self._listen(key, service)

    async def _listen(self, key: tuple[str, int], service: Object) -> None:
        owner, port = key
        local = self._ports.take(self._store.cluster, owner, port, self._config.service_ports)

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connect(key, reader, writer)

        try:
            self._servers[key] = await asyncio.start_server(connect, HOST, local)
        except OSError:
            log.exception("service %s cannot listen on port %s", owner, local)
            return
        self._annotate(service)

    def _annotate(self, service: Object) -> None:
        """Write the service's local address into its annotation; for a load balancer, also into its status."""
        latest = self._store.latest(SERVICE, service)
        if latest is None:
            return
        local = self._ports.of(self._store.cluster, _owner(service))
        urls = {str(port): f"http://{HOST}:{number}" for port, number in sorted(local.items())}
        latest["metadata"].setdefault("annotations", {})[URLS] = json.dumps(urls)
        if latest["spec"]["type"] == "LoadBalancer":
            ports = [{"port": number, "protocol": "TCP"} for _, number in sorted(local.items())]
            latest["status"] = {"loadBalancer": {"ingress": [{"ip": HOST, "ipMode": "VIP", "ports": ports}]}}
        self._store.replace(SERVICE, latest)

    async def _connect(self, key: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            namespace, _, name = key[0].partition("/")
            service = self._store.find(SERVICE, namespace, name)
            local = self._service_port(service, str(key[1])) if service else None
            if local is None:
                return
            await _join(reader, writer, local)
        except OSError as error:
            log.info("connection to service %s: %s", key[0], error)
        finally:
            self._connections.discard(task)
            await _close(writer)

    def _service_port(self, service: Object, port: str) -> int | None:
        """A local port of the service's pods, which take turns; None while no pod is ready."""
        ports = service["spec"].get("ports", [])
        chosen = [entry for entry in ports if port in ("", str(entry["port"]), entry.get("name"))]
        if not chosen:
            raise Refusal(503, f'no endpoints available for service "{service["metadata"]["name"]}:{port}"')
        local = [number for _, number in self.targets(service, str(chosen[0]["targetPort"]))]
        return local[next(self._turns) % len(local)] if local else None

    def targets(self, service: Object, port: str) -> list[tuple[str, int]]:
        """The uid of each ready pod of a service, and the local port for its port."""
        found = [(pod["metadata"]["uid"], self._pod_port(pod, port)) for pod in self._endpoints(service)]
        return [(uid, local) for uid, local in found if local is not None]

    def _endpoints(self, service: Object) -> list[Object]:
        selector, unready = service["spec"].get("selector", {}), service["spec"].get("publishNotReadyAddresses")
        return [
            pod
            for pod in self._store.items(POD, service["metadata"]["namespace"])
            if selector.items() <= pod["metadata"].get("labels", {}).items()
            and (is_ready(pod) or (unready and pod["spec"].get("nodeName")))
            and not is_finished(pod)
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def _pod_port(self, pod: Object, port: str) -> int | None:
        """The local port for a pod's port, given by number or name; for the pod's first port if `port` is empty."""
        for container in pod["spec"]["containers"]:
            ports = container.get("ports", [])
            number = port_number(container, port) if port else next((entry["containerPort"] for entry in ports), None)
            if number is not None:
                local = self._ports.find(self._store.cluster, pod["metadata"]["uid"], number)
                if local is not None:
                    return local
        return None

    async def _relay(self, request: web.BaseRequest, url: URL) -> web.StreamResponse:
        # The Authorization header is for the API server, not for the pod.
        headers = end_to_end(request.headers, dropped=["authorization", "host"])
        return await relay(self._session, request, url, headers)


def _owner(service: Object) -> str:
    return f"{service['metadata']['namespace']}/{service['metadata']['name']}"


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, local: int) -> None:
    """Copy bytes in both directions until both sides have ended."""
    upstream_reader, upstream_writer = await asyncio.open_connection(HOST, local)
    try:
        await asyncio.gather(_copy(reader, upstream_writer), _copy(upstream_reader, writer))
    finally:
        await _close(upstream_writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
