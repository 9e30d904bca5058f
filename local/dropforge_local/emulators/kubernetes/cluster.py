"""A cluster: API server, controllers, kubelet and services over a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping

import aiohttp
from aiohttp import web

from dropforge_local.base.errors import ApiError

from ..kit.background import stop_all
from .api import ApiServer
from .certificates import Certificates, server_context
from .controllers.deployments import DeploymentController, ReplicaSetController
from .controllers.garbage import GarbageCollector, NamespaceController
from .controllers.jobs import JobController
from .controllers.loop import ControlLoop
from .controllers.owned import Tools, is_finished
from .controllers.scheduler import PREEMPTED, NodeController, Scheduler
from .controllers.volumes import CLASSES, ClaimController, EphemeralVolumes
from .gateways import Gateways, RouteController, Routes
from .kinds import BY_NAME, NODE, POD
from .kubelet.execution import ExecRequest
from .kubelet.logs import LogRequest, container_of, log_id, read_log
from .kubelet.pods import Kubelet
from .kubelet.probes import Command
from .objects import Objects
from .paths import Target
from .ray.clusters import RayClusterController
from .ray.jobs import RayJobs
from .recorder import Recorder
from .services import Services
from .shared import Shared
from .store import Change, Object, Store

OWN_NAMESPACES: list[Object] = [
    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    for name in ("default", "kube-system", "kube-public", "kube-node-lease")
]
OWN_OBJECTS = [*OWN_NAMESPACES, *CLASSES]


class Cluster:
    """A cluster with a running API server."""

    def __init__(self, shared: Shared, name: str, port: int, certificates: Certificates) -> None:
        self.name = name
        self.port = port
        self._certificates = certificates
        self._shared = shared
        self.store = Store(shared.host.db, name, shared.config.watch_history)
        self.objects = Objects(self.store, shared.host.clock, shared.config)
        recorder = Recorder(self.store, shared.host.clock, shared.config.event_seconds)
        self._tools = Tools(self.objects, recorder, shared.host.clock, shared.config)
        self._scheduler = Scheduler(self._tools, shared.faults)
        self._routes = Routes(shared.host.clock, shared.config.gateway_spread_seconds)
        self._loop = ControlLoop(
            shared.host.db,
            shared.host.clock,
            [
                JobController(self._tools),  # before the collector, which removes the references that it reads
                DeploymentController(self._tools),
                ReplicaSetController(self._tools),
                RayClusterController(self._tools, shared.ports),
                EphemeralVolumes(self._tools),
                ClaimController(self._tools, shared.runner.disks),
                RouteController(self._tools, self._routes),
                GarbageCollector(self._tools),
                NamespaceController(self._tools),
                self._scheduler,
                NodeController(self._tools, self._scheduler.is_claimed),
            ],
        )

    async def start(self) -> None:
        """Serve, and continue the work of an earlier stack. Raises OSError if the port is taken."""
        shared = self._shared
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        self.kubelet = Kubelet(self._tools, shared.runner, shared.ports, self._session)
        self.services = Services(self.store, shared.ports, shared.config, self._session)
        self.gateways = Gateways(
            self.store,
            shared.ports,
            shared.config,
            self.services,
            self._routes,
            self._session,
            self._tools,
            shared.balanced,
        )
        self._ray_jobs = RayJobs(self._tools, shared.ports, self._session)
        self._api = ApiServer(self.objects, self.port, shared, self, server_context(self._certificates))
        self.store.on_change = self._on_change
        self.services.start()
        self.gateways.start()
        self.kubelet.start()
        self._ray_jobs.start()
        self._running = asyncio.get_running_loop().create_task(self._loop.run())
        await self._api.start()

    async def stop(self) -> None:
        """Stop serving; containers continue. Every part stops, also after another part raises."""
        parts = (self._ray_jobs.stop, self.kubelet.stop, self.gateways.stop, self.services.stop, self._session.close)
        await stop_all(self._api.stop, self._stop_loop, *parts)

    def retry_pending_pods(self) -> None:
        """Try again to place pending pods: stock or quota has changed."""
        self._loop.reconcile_all(self._scheduler)

    def preempt(self, target: Mapping[str, str]) -> None:
        """Remove a node; `target` names the node, or a pod ("namespace/name") on it."""
        name = target.get("node") or str(self._bound_pod(target.get("pod", ""))["spec"]["nodeName"])
        with self.store.db.transaction():
            node = self.store.find(NODE, "", name)
            if node is None:
                raise ApiError("NOT_FOUND", f"cluster {self.name!r} has no node {name!r}")
            node["spec"]["unschedulable"] = True
            node["metadata"]["annotations"][PREEMPTED] = "true"
            self.store.replace(NODE, node)
            for pod in self.store.items(POD):
                if pod["spec"].get("nodeName") == name and not is_finished(pod):
                    self.kubelet.preempt(pod)

    def evict(self, pod_name: str) -> None:
        """End a pod ("namespace/name") as a node under memory pressure does."""
        with self.store.db.transaction():
            self.kubelet.evict(self._bound_pod(pod_name))

    async def read_log(self, pod: Object, request: LogRequest) -> AsyncIterator[bytes]:
        name = container_of(pod, request.container)
        container_id = log_id(pod, name, previous=request.previous)
        runtime = self._shared.runner.runtime

        def has_ended() -> bool:
            container = runtime.containers.get(container_id)
            return container is None or container.exit is not None

        async for piece in read_log(runtime.directory / container_id, request, has_ended):
            yield piece

    async def forward(self, request: web.BaseRequest, target: Target) -> web.StreamResponse:
        return await self.services.forward(request, target)

    def command(self, pod: Object, request: ExecRequest) -> Command:
        return self.kubelet.command(pod, container_of(pod, request.container), request.words)

    def local_port(self, pod: Object, port: int) -> int | None:
        return self._shared.ports.find(self.name, pod["metadata"]["uid"], port)

    async def _stop_loop(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def _bound_pod(self, pod_name: str) -> Object:
        namespace, _, name = pod_name.rpartition("/")
        pod = self.store.find(POD, namespace or "default", name)
        if pod is None or not pod["spec"].get("nodeName"):
            raise ApiError("NOT_FOUND", f"pod {pod_name!r} is on no node of cluster {self.name!r}")
        return pod

    def _on_change(self, change: Change) -> None:
        self._loop.on_change(change)
        self.kubelet.on_change(change)
        self._ray_jobs.on_change(change)
        self.services.on_change(change)
        self.gateways.on_change(change)


def ensure_objects(objects: Objects, manifests: Iterable[Object]) -> None:
    """Create the objects that do not exist yet."""
    for manifest in manifests:
        kind = BY_NAME[manifest["apiVersion"], manifest["kind"]]
        item, _ = objects.parse(kind, manifest)
        namespace, name = item["metadata"].get("namespace", ""), item["metadata"]["name"]
        if objects.store.find(kind, namespace, name) is None:
            objects.create(kind, namespace, item)
