"""The load balancers of Gateways: a local port for each Gateway, whose requests go to pods by routes and their weights.

As Google's do, a load balancer takes a changed route late, its proxies take it one after the other, it sends requests
only to pods that answer the health check, and it cuts an answer at the backend's timeout.
https://cloud.google.com/load-balancing/docs/l7-internal
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

import aiohttp
from aiohttp import web
from yarl import URL

from dropforge_local.base.clock import Clock
from dropforge_local.base.ports import HOST

from ..cloudrun.counts import Answered, Counts
from ..kit.background import Background, stop_all
from ..kit.relay import end_to_end, fail, refuse, relay
from .config import KubernetesConfig
from .controllers.loop import Key
from .controllers.owned import Tools, all_keys
from .gatewayrules import CLASS
from .kinds import BACKEND_POLICY, GATEWAY, GATEWAY_POLICY, HEALTH_POLICY, HTTP_ROUTE, SERVICE
from .ports import Ports
from .services import Services
from .store import Change, Object, Store

log = logging.getLogger(__name__)

CONTROLLER = "networking.gke.io/gateway"
NEG_STATUS = "cloud.google.com/neg-status"
TIMEOUT_SECONDS = 30.0  # of a backend without a policy
CHECK_SECONDS = 5.0


class Programmed(NamedTuple):
    """A route as the proxies have it: from `since` on all of them have `spec`, and until then some have `before`."""

    gateway: str
    spec: Object
    before: Object | None
    since: float


class Routes:
    """The routes that load balancers have, by namespace and name."""

    def __init__(self, clock: Clock, spread_seconds: float) -> None:
        self._clock = clock
        self._spread = spread_seconds
        self._known: dict[Key, Programmed] = {}

    def program(self, key: Key, gateway: str, spec: Object) -> None:
        known = self._known.get(key)
        if known is None:
            self._known[key] = Programmed(gateway, spec, None, 0.0)
        elif known.spec != spec:
            self._known[key] = Programmed(gateway, spec, known.spec, self._clock.now() + self._spread)

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)

    def rules(self, namespace: str, gateway: str) -> Iterator[Object]:
        """The rules by which one of the proxies of a Gateway decides now."""
        for (space, _), known in list(self._known.items()):
            if (space, known.gateway) == (namespace, gateway):
                is_late = known.before is not None and self._clock.now() < known.since and random.random() < 0.5
                spec = known.before if is_late and known.before is not None else known.spec
                yield from spec["rules"]


class RouteController:
    """Gives routes to the load balancer of their Gateway, and writes their status. Its keys are routes."""

    def __init__(self, tools: Tools, routes: Routes) -> None:
        self._tools = tools
        self._routes = routes
        self._seen: dict[str, tuple[int, float]] = {}  # by uid: a generation, and when it was seen first

    def keys(self, change: Change) -> Iterator[Key]:
        if change.kind == HTTP_ROUTE:
            yield change.namespace, change.name
        elif change.kind in (GATEWAY, SERVICE):
            store = self._tools.store
            yield from (key for key in all_keys(store, HTTP_ROUTE) if key[0] == change.namespace)

    def all_keys(self) -> list[Key]:
        return all_keys(self._tools.store, HTTP_ROUTE)

    def reconcile(self, key: Key) -> float | None:
        route = self._tools.store.find(HTTP_ROUTE, *key)
        gateway = self._gateway(route) if route else None
        if route is None or gateway is None:
            self._routes.forget(key)
            return None
        metadata = route["metadata"]
        generation, since = self._seen.get(metadata["uid"], (0, 0.0))
        if generation != metadata["generation"]:
            was_programmed = not generation and bool(route.get("status"))  # before this stack has started
            since = 0.0 if was_programmed else self._tools.now()
            self._seen[metadata["uid"]] = metadata["generation"], since
        due = since + self._tools.config.gateway_seconds
        if self._tools.now() < due:
            return due
        missing = [name for name in _backends(route) if self._tools.store.find(SERVICE, key[0], name) is None]
        if not missing:
            self._routes.program(key, gateway["metadata"]["name"], route["spec"])
            for name, port in _backends(route).items():
                self._tell_group(key[0], name, port)
        self._tell(route, missing)
        return None

    def _gateway(self, route: Object) -> Object | None:
        """The Gateway of a route, if this controller has it and it takes the route."""
        for parent in route["spec"].get("parentRefs", ()):
            namespace = parent.get("namespace") or route["metadata"]["namespace"]
            found = self._tools.store.find(GATEWAY, namespace, parent["name"])
            if found and found["spec"]["gatewayClassName"] == CLASS and namespace == route["metadata"]["namespace"]:
                return found
        return None

    def _tell_group(self, namespace: str, name: str, port: int) -> None:
        """Write the names of a service's network endpoint groups into its annotation."""
        service = self._tools.store.find(SERVICE, namespace, name)
        if service is None:
            return
        status = {"network_endpoint_groups": {str(port): group_of(self._tools.store.cluster, namespace, name, port)}}
        service["metadata"].setdefault("annotations", {})[NEG_STATUS] = json.dumps(status)
        self._tools.store.replace(SERVICE, service)

    def _tell(self, route: Object, missing: list[str]) -> None:
        """Write the conditions of a route."""
        text = f'Service "{missing[0]}" not found' if missing else ""
        wanted = {
            "Accepted": (True, "Accepted", ""),
            "ResolvedRefs": (not missing, "BackendNotFound" if missing else "ResolvedRefs", text),
            "Reconciled": (not missing, "ReconciliationFailed" if missing else "ReconciliationSucceeded", text),
        }
        parents = route.get("status", {}).get("parents") or [{}]
        before = {each["type"]: each for each in parents[0].get("conditions", ())}
        conditions = []
        for kind, (is_true, reason, message) in wanted.items():
            status = "True" if is_true else "False"
            is_same = before.get(kind, {}).get("status") == status
            conditions.append({
                "type": kind,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": before[kind]["lastTransitionTime"] if is_same else self._tools.stamp(),
                "observedGeneration": route["metadata"]["generation"],
            })  # fmt: skip
        reference = route["spec"]["parentRefs"][0]
        parent = {"parentRef": reference, "controllerName": CONTROLLER, "conditions": conditions}
        self._tools.store.replace(HTTP_ROUTE, {**route, "status": {"parents": [parent]}})


class Gateways:
    """The proxies of a cluster's Gateways. `counts` are the answers by the network endpoint group of the pods."""

    def __init__(
        self,
        store: Store,
        ports: Ports,
        config: KubernetesConfig,
        services: Services,
        routes: Routes,
        session: aiohttp.ClientSession,
        tools: Tools,
        counts: Counts,
    ) -> None:
        self._store = store
        self._ports = ports
        self._config = config
        self._services = services
        self._routes = routes
        self._session = session
        self._tools = tools
        self._counts = counts
        self._turns = itertools.count()
        self._healthy: set[tuple[str, str]] = set()
        self._policies: dict[tuple[str, str, str], Object] = {}
        self._runners: dict[Key, web.ServerRunner] = {}
        self._background = Background("gateways")
        self._lock = asyncio.Lock()

    def start(self) -> None:
        self._read_policies()
        for route in self._store.items(HTTP_ROUTE):  # a load balancer of an earlier stack keeps its routes
            if route.get("status"):
                key = route["metadata"]["namespace"], route["metadata"]["name"]
                self._routes.program(key, route["spec"]["parentRefs"][0]["name"], route["spec"])
        self._background.spawn(self._align())

    async def stop(self) -> None:
        await stop_all(self._background.stop, *(runner.cleanup for runner in self._runners.values()))
        self._runners.clear()

    def on_change(self, change: Change) -> None:
        if change.kind == GATEWAY:
            self._background.spawn(self._align())
        elif change.kind in (BACKEND_POLICY, HEALTH_POLICY, GATEWAY_POLICY):
            self._read_policies()

    def _read_policies(self) -> None:
        self._policies = {
            (kind.key, item["metadata"]["namespace"], item["spec"]["targetRef"]["name"]): item["spec"].get(
                "default", {}
            )
            for kind in (BACKEND_POLICY, HEALTH_POLICY)
            for item in self._store.items(kind)
        }

    async def _align(self) -> None:
        """Listen for exactly the Gateways that exist."""
        async with self._lock:
            gateways = {
                (item["metadata"]["namespace"], item["metadata"]["name"]): item
                for item in self._store.items(GATEWAY)
                if item["spec"]["gatewayClassName"] == CLASS
            }
            for key in [key for key in self._runners if key not in gateways]:
                await self._runners.pop(key).cleanup()
                self._ports.release(self._store.cluster, _owner(key))
            for key, gateway in gateways.items():
                if key not in self._runners:
                    await self._listen(key, gateway["spec"]["listeners"][0]["port"])
                self._tell(key)

    async def _listen(self, key: Key, port: int) -> None:
        local = self._ports.take(self._store.cluster, _owner(key), port, self._config.service_ports)

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await self._handle(key, request)

        # A caller that disconnects cancels its request: an unread answer must not keep a pod busy.
        runner = web.ServerRunner(web.Server(handle, handler_cancellation=True, access_log=None), shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, HOST, local).start()
        self._runners[key] = runner

    def _tell(self, key: Key) -> None:
        """Write the status of a Gateway. Its address has the local port: in the cloud the port is the listener's."""
        gateway = self._store.find(GATEWAY, *key)
        if gateway is None:
            return
        (local,) = self._ports.of(self._store.cluster, _owner(key)).values()
        done = gateway.get("status", {}).get("conditions") or [
            {"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": self._tools.stamp()}
            for kind in ("Accepted", "Programmed")
        ]
        conditions = [{**each, "observedGeneration": gateway["metadata"]["generation"]} for each in done]
        addresses = [{"type": "IPAddress", "value": f"{HOST}:{local}"}]
        self._store.replace(GATEWAY, {**gateway, "status": {"addresses": addresses, "conditions": conditions}})

    async def _handle(self, key: Key, request: web.BaseRequest) -> web.StreamResponse:
        rule, prefix = self._rule(key, request.path)
        if rule is None:
            return refuse(404, "fault filter abort")
        references = [each for each in rule.get("backendRefs", ()) if each["weight"]]
        if not references:
            return refuse(503, "no healthy upstream")
        chosen = random.choices(references, [each["weight"] for each in references])[0]
        loop = asyncio.get_running_loop()
        began = loop.time()
        response = await self._answer(key[0], chosen, request, _rewritten(rule, prefix, request.raw_path))
        group = group_of(self._store.cluster, key[0], chosen["name"], chosen["port"])
        self._counts.add(group, Answered(self._tools.now(), response.status, loop.time() - began))
        return response

    def _rule(self, key: Key, path: str) -> tuple[Object | None, str]:
        """The rule with the longest prefix of a path, and the prefix."""
        found: tuple[Object | None, str] = None, ""
        for rule in self._routes.rules(*key):
            for match in rule["matches"]:
                prefix = match["path"]["value"].rstrip("/")
                if (path == prefix or path.startswith(f"{prefix}/")) and (
                    found[0] is None or len(prefix) > len(found[1])
                ):
                    found = rule, prefix
        return found

    async def _answer(self, namespace: str, chosen: Object, request: web.BaseRequest, path: str) -> web.StreamResponse:
        policy = self._policies.get((BACKEND_POLICY.key, namespace, chosen["name"]), {})
        try:
            async with asyncio.timeout(policy.get("timeoutSec", TIMEOUT_SECONDS)):
                local = await self._target(namespace, chosen)
                return await self._forward(request, local, path) if local else refuse(503, "no healthy upstream")
        except TimeoutError:
            return fail(request, 504, "upstream request timeout")
        except aiohttp.ClientConnectionError as error:
            log.info("request to service %s failed: %s", chosen["name"], error)
            return fail(request, 503, "upstream connect error")

    async def _target(self, namespace: str, chosen: Object) -> int | None:
        """The local port of a healthy pod of a service; they take turns."""
        service = self._store.find(SERVICE, namespace, chosen["name"])
        ports = [entry for entry in (service or {}).get("spec", {}).get("ports", ()) if entry["port"] == chosen["port"]]
        if service is None or not ports:
            return None
        config = self._policies.get((HEALTH_POLICY.key, namespace, chosen["name"]), {}).get("config", {})
        path = config.get("httpHealthCheck", {}).get("requestPath") or "/"
        targets = self._services.targets(service, str(ports[0]["targetPort"]))
        healthy = [local for uid, local in targets if await self._is_healthy(uid, local, path)]
        return healthy[next(self._turns) % len(healthy)] if healthy else None

    async def _is_healthy(self, pod: str, local: int, path: str) -> bool:
        """Whether a pod has answered the health check. After that, its readiness alone decides."""
        if (pod, path) not in self._healthy:
            timeout = aiohttp.ClientTimeout(total=CHECK_SECONDS)
            try:
                async with self._session.get(f"http://{HOST}:{local}{path}", timeout=timeout) as answer:
                    if answer.status != 200:
                        return False
            except (aiohttp.ClientError, TimeoutError):
                return False
            self._healthy.add((pod, path))
        return True

    async def _forward(self, request: web.BaseRequest, local: int, path: str) -> web.StreamResponse:
        headers = end_to_end(request.headers)
        headers.add("X-Forwarded-For", request.remote or HOST)
        headers.add("Via", "1.1 google")
        url = URL(f"http://{HOST}:{local}{path}", encoded=True)
        return await relay(self._session, request, url, headers)


def group_of(cluster: str, namespace: str, service: str, port: int) -> str:
    """The name of the network endpoint group with the pods of a port of a service."""
    unique = sha256(f"{cluster} {namespace} {service} {port}".encode()).hexdigest()[:8]
    own = sha256(cluster.encode()).hexdigest()[:8]
    return f"k8s1-{own}-{namespace[:12]}-{service[:20]}-{port}-{unique}"


def _backends(route: Object) -> dict[str, int]:
    """The services of a route, also those of no weight, and their ports."""
    return {each["name"]: each["port"] for rule in route["spec"]["rules"] for each in rule.get("backendRefs", ())}


def _rewritten(rule: Object, prefix: str, path: str) -> str:
    """The path for the pod. As Envoy does, the prefix alone is replaced: "/a" by "/" makes "//b" of "/a/b"."""
    for each in rule.get("filters", ()):
        return str(each["urlRewrite"]["path"]["replacePrefixMatch"]) + path.removeprefix(prefix)
    return path


def _owner(key: Key) -> str:
    return f"gateway {' '.join(key)}"  # without "/", which is in the names of services
