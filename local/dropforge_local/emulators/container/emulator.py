"""The GKE API v1: clusters, their operations, node pools as far as Autopilot shows them, and server config.

An Operation of this API is its own message, not a google.longrunning one, and its name is short.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
from aiohttp import web
from google.cloud import container_v1

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import RPC_CODE, ApiError
from dropforge_local.base.ports import HOST

from ..faults import Faulty, Switches, parse_faults
from ..kit import rpc
from ..kubernetes import KubernetesEmulator
from ..kubernetes.times import timestamp
from . import rules
from .config import GkeConfig
from .store import Cluster, Operation, Store

log = logging.getLogger(__name__)

LOCATION = "projects/*/locations/*"
SERVICE = "container.googleapis.com"
CLUSTER = f"{LOCATION}/clusters/*"
Status = container_v1.Cluster.Status
OperationStatus = container_v1.Operation.Status
OperationType = container_v1.Operation.Type


def _method(name: str, response: str, *http: str, request: str = "") -> rpc.Method:
    request_class, response_class = (getattr(container_v1, one).pb() for one in (request or f"{name}Request", response))
    return rpc.Method(name, request_class, response_class, http)


METHODS = (
    _method("ListClusters", "ListClustersResponse", f"GET /v1/{{parent={LOCATION}}}/clusters"),
    _method("GetCluster", "Cluster", f"GET /v1/{{name={CLUSTER}}}"),
    _method("CreateCluster", "Operation", f"POST /v1/{{parent={LOCATION}}}/clusters *"),
    _method("DeleteCluster", "Operation", f"DELETE /v1/{{name={CLUSTER}}}"),
    _method("SetLabels", "Operation", f"POST /v1/{{name={CLUSTER}}}:setResourceLabels *"),
    _method("ListOperations", "ListOperationsResponse", f"GET /v1/{{parent={LOCATION}}}/operations"),
    _method("GetOperation", "Operation", f"GET /v1/{{name={LOCATION}/operations/*}}"),
    _method("GetServerConfig", "ServerConfig", f"GET /v1/{{name={LOCATION}}}/serverConfig"),
    _method("ListNodePools", "ListNodePoolsResponse", f"GET /v1/{{parent={CLUSTER}}}/nodePools"),
    _method("CreateNodePool", "Operation", f"POST /v1/{{parent={CLUSTER}}}/nodePools *"),
)


class GkeEmulator:
    """GKE over REST and gRPC; `kubernetes` serves what the clusters are. Satisfies server.Emulator.

    It must come after `kubernetes` in the server's list: that one opens the ports of the clusters that exist.
    """

    def __init__(
        self,
        db: Database,
        clock: Clock,
        *,
        kubernetes: KubernetesEmulator,
        config: GkeConfig = GkeConfig(),  # noqa: B008 - frozen
    ) -> None:
        self._clock = clock
        self._config = config
        self._kubernetes = kubernetes
        self._store = Store(db)
        self._faults = Switches(db, "container_settings", {"stockout": [], "quota": {}})
        self._tasks: set[asyncio.Task[None]] = set()
        self._service = rpc.Service("google.container.v1.ClusterManager", METHODS, Faulty(self, self._faults))

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return [
            *rpc.routes([self._service]),
            web.get(f"/v1/projects/{{project}}/services/{SERVICE}", self._service_state),
            web.post("/_local/container/faults", self._set_faults),
        ]

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        return rpc.grpc_handlers([self._service])

    async def start(self) -> None:
        self._correct_endpoints()
        for operation, target, created in self._store.unfinished():
            self._spawn(self._carry_out(operation, target, created))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def live(self) -> list[str]:
        """Clusters that exist."""
        return self.names_in(self._store.db)

    @staticmethod
    def names_in(db: Database) -> list[str]:
        """Clusters in a state file; none when it has never had one."""
        if not db.connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'container_clusters'").fetchone():
            return []
        return [row["name"] for row in db.connection.execute("SELECT name FROM container_clusters ORDER BY name")]

    def ensure_cluster(self, name: str) -> None:
        """Make an Autopilot cluster that runs, without waiting or an operation; nothing happens when it is there."""
        if self._store.find_cluster(name) is not None:
            return
        parent, short_name = name.split("/clusters/")
        addons = {"ray_operator_config": {"enabled": True}}  # as terraform/gke.tf has it
        cluster = Cluster(name=short_name, autopilot={"enabled": True}, addons_config=addons)
        rules.check_cluster(cluster, parent.rsplit("/", 1)[1])
        rules.complete(cluster, name, self._config, self._now())
        with self._store.db.transaction():
            self._kubernetes.add_cluster(name)
            self._connect(cluster, name)
            self._store.put_cluster(name, cluster, self._clock.now())

    def list_clusters(self, request: Any) -> Any:
        return container_v1.ListClustersResponse.pb()(clusters=self._store.clusters(request.parent))

    def get_cluster(self, request: Any) -> Any:
        return self._store.get_cluster(request.name)

    def create_cluster(self, request: Any) -> Any:
        cluster, parent = request.cluster, request.parent
        location = parent.rsplit("/", 1)[1]
        rules.check_cluster(cluster, location)
        name = f"{parent}/clusters/{cluster.name}"
        with self._store.db.transaction():
            if self._store.find_cluster(name) is not None:
                raise ApiError("ALREADY_EXISTS", f"Already exists: {name}.")
            self._check_quota(parent, location)
            rules.complete(cluster, name, self._config, self._now())
            cluster.status = Status.PROVISIONING
            self._store.put_cluster(name, cluster, self._clock.now())
            return self._begin(OperationType.CREATE_CLUSTER, name)

    def delete_cluster(self, request: Any) -> Any:
        with self._store.db.transaction():
            cluster = self._store.get_cluster(request.name)
            self._check_idle(request.name)
            cluster.status = Status.STOPPING
            self._store.put_cluster(request.name, cluster)
            return self._begin(OperationType.DELETE_CLUSTER, request.name)

    def set_labels(self, request: Any) -> Any:
        with self._store.db.transaction():
            cluster = self._store.get_cluster(request.name)
            self._check_idle(request.name)
            if request.label_fingerprint != cluster.label_fingerprint:
                raise ApiError("FAILED_PRECONDITION", "Labels could not be set due to fingerprint mismatch.")
            labels = dict(request.resource_labels)
            rules.check_labels(labels)
            cluster.resource_labels.clear()
            cluster.resource_labels.update(labels)
            cluster.label_fingerprint = rules.fingerprint(labels)
            self._store.put_cluster(request.name, cluster)
            return self._begin(OperationType.SET_LABELS, request.name)

    def list_operations(self, request: Any) -> Any:
        return container_v1.ListOperationsResponse.pb()(operations=self._store.operations(request.parent))

    def get_operation(self, request: Any) -> Any:
        return self._store.get_operation(request.name)

    def get_server_config(self, request: Any) -> Any:
        rules.check_location(request.name.rsplit("/", 1)[1])
        version = self._config.version
        channels = [
            {"channel": channel, "default_version": version, "valid_versions": [version]} for channel in (1, 2, 3)
        ]
        return container_v1.ServerConfig.pb(
            container_v1.ServerConfig(
                default_cluster_version=version,
                valid_master_versions=[version],
                valid_node_versions=[version],
                default_image_type="COS_CONTAINERD",
                valid_image_types=["COS_CONTAINERD"],
                channels=channels,
            )
        )

    def list_node_pools(self, request: Any) -> Any:
        self._store.get_cluster(request.parent)
        return container_v1.ListNodePoolsResponse.pb()()

    def create_node_pool(self, request: Any) -> Any:
        self._store.get_cluster(request.parent)
        raise ApiError("INVALID_ARGUMENT", "Autopilot clusters do not support mutating node pools.")

    def _check_quota(self, parent: str, location: str) -> None:
        quota = self._faults.get("quota").get(location, self._config.clusters_per_location)
        used = len(self._store.clusters(parent))
        if used >= quota:
            raise ApiError(
                "PERMISSION_DENIED",
                'Insufficient regional quota to satisfy request: resource "GKE_CLUSTERS": request requires '
                f"'1.0' and is short '1.0'. project has a quota of '{quota}' with '{max(quota - used, 0)}' available.",
            )

    def _check_idle(self, name: str) -> None:
        """One operation at a time, as GKE has it."""
        for operation, _, _ in self._store.unfinished(name):
            short = operation.rsplit("/", 1)[1]
            raise ApiError("FAILED_PRECONDITION", f"Cluster is running incompatible operation {short}.")

    def _begin(self, kind: Any, target: str) -> Any:
        parent = target.rsplit("/clusters/", 1)[0]
        location = parent.rsplit("/", 1)[1]
        operation = Operation(
            operation_type=kind,
            status=OperationStatus.RUNNING,
            location=location,
            zone=location,
            start_time=self._now(),
            target_link=f"https://container.googleapis.com/v1/{target}",
        )
        created = self._clock.now()
        name = self._store.add_operation(operation, parent, target, created)
        operation.self_link = f"https://container.googleapis.com/v1/{name}"
        self._store.put_operation(name, operation)
        self._store.db.after_commit(lambda: self._spawn(self._carry_out(name, target, created)))
        return operation

    async def _carry_out(self, name: str, target: str, created: float) -> None:
        """What an operation stands for; every step may be done again after a restart."""
        operation = self._store.get_operation(name)
        steps: dict[int, tuple[float, Callable[[Any, str], Coroutine[Any, Any, None]]]] = {
            OperationType.CREATE_CLUSTER: (self._config.create_seconds, self._create),
            OperationType.DELETE_CLUSTER: (self._config.delete_seconds, self._delete),
            OperationType.SET_LABELS: (self._config.label_seconds, self._set_labels),
        }
        delay, step = steps[operation.operation_type]
        await self._clock.sleep_until(created + delay)
        await step(operation, target)
        operation.status, operation.end_time = OperationStatus.DONE, self._now()
        self._store.put_operation(name, operation)

    async def _create(self, operation: Any, name: str) -> None:
        cluster = self._store.get_cluster(name)
        if cluster.location in self._faults.get("stockout"):
            self._fail(operation, cluster, name)
            return
        self._kubernetes.add_cluster(name)
        await self._kubernetes.open_cluster(name)
        self._connect(cluster, name)
        self._store.put_cluster(name, cluster)

    def _connect(self, cluster: Any, name: str) -> None:
        """Say where a cluster's Kubernetes API is."""
        cluster.status = Status.RUNNING
        cluster.endpoint = f"{HOST}:{self._kubernetes.port_of(name)}"
        cluster.control_plane_endpoints_config.ip_endpoints_config.enabled = True
        cluster.control_plane_endpoints_config.ip_endpoints_config.public_endpoint = cluster.endpoint
        authority = self._kubernetes.authority_of(name)
        cluster.master_auth.cluster_ca_certificate = base64.b64encode(authority.encode()).decode()

    def _correct_endpoints(self) -> None:
        """Clusters move to another port when somebody else took theirs while no stack ran."""
        for name in self.live():
            cluster = self._store.get_cluster(name)
            if cluster.status == Status.RUNNING and cluster.endpoint != f"{HOST}:{self._kubernetes.port_of(name)}":
                self._connect(cluster, name)
                self._store.put_cluster(name, cluster)

    async def _delete(self, operation: Any, name: str) -> None:
        await self._kubernetes.remove_cluster(name)
        self._store.delete_cluster(name)

    async def _set_labels(self, operation: Any, name: str) -> None:
        """The labels are there already; GKE takes a while to tell."""

    def _fail(self, operation: Any, cluster: Any, name: str) -> None:
        """A create that found no machines: the cluster stays, in ERROR, until it is deleted."""
        message = (
            f"All cluster resources were brought up, but: only 0 nodes out of 1 have registered; GCE_STOCKOUT: "
            f"ZONE_RESOURCE_POOL_EXHAUSTED in {cluster.location}: does not have enough resources available."
        )
        code = container_v1.StatusCondition.Code.GCE_STOCKOUT
        condition = {"code": code, "message": message, "canonical_code": RPC_CODE["RESOURCE_EXHAUSTED"]}
        cluster.status, cluster.status_message = Status.ERROR, message
        cluster.conditions.add(**condition)
        operation.cluster_conditions.add(**condition)
        operation.status_message = message
        operation.error.code, operation.error.message = RPC_CODE["RESOURCE_EXHAUSTED"], message
        self._store.put_cluster(name, cluster)

    async def _service_state(self, request: web.Request) -> web.Response:
        """Service Usage's answer to gcloud, which asks whether the API is enabled before it creates a cluster."""
        project = request.match_info["project"]
        name = f"projects/{project}/services/{SERVICE}"
        return web.json_response({"name": name, "parent": f"projects/{project}", "state": "ENABLED"})

    async def _set_faults(self, request: web.Request) -> web.Response:
        body = parse_faults(await request.read())
        return web.json_response(self._faults.configure(body, {rpc.snake_case(one.name) for one in METHODS}))

    def _now(self) -> str:
        return timestamp(self._clock.now())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("an operation of GKE failed; it is tried again at the next start", exc_info=error)
