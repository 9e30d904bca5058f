"""The GKE API v1: clusters, their operations, node pools as far as Autopilot shows them, and server config."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from typing import Any

from google.cloud import container_v1

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError
from dropforge_local.base.ports import HOST

from ..kit import rpc
from ..kit.access import Guarded, guarded
from ..kit.emulator import RpcEmulator
from ..kit.faults import Faulty, Switches, names_of
from ..kit.messages import Messages
from ..kit.names import Named
from ..kit.operations import EMPTY, Operation, Operations
from ..kit.routing import Call, Route
from ..kubernetes import KubernetesEmulator
from ..kubernetes.times import timestamp
from . import rules
from .config import GkeConfig
from .permissions import FURTHER, NEEDS, SERVICE_STATE
from .wire import STOCKOUT, operation_message

LOCATION = "projects/*/locations/*"
SERVICE = "container.googleapis.com"
CLUSTER = f"{LOCATION}/clusters/*"
Cluster = container_v1.Cluster.pb()
Status = container_v1.Cluster.Status


METHODS = rpc.methods(
    container_v1,
    f"""
    ListClusters() ListClustersResponse GET /v1/{{parent={LOCATION}}}/clusters
    GetCluster() Cluster GET /v1/{{name={CLUSTER}}}
    CreateCluster() Operation POST /v1/{{parent={LOCATION}}}/clusters *
    DeleteCluster() Operation DELETE /v1/{{name={CLUSTER}}}
    SetLabels() Operation POST /v1/{{name={CLUSTER}}}:setResourceLabels *
    ListOperations() ListOperationsResponse GET /v1/{{parent={LOCATION}}}/operations
    GetOperation() Operation GET /v1/{{name={LOCATION}/operations/operation-*}}
    GetServerConfig() ServerConfig GET /v1/{{name={LOCATION}}}/serverConfig
    ListNodePools() ListNodePoolsResponse GET /v1/{{parent={CLUSTER}}}/nodePools
    CreateNodePool() Operation POST /v1/{{parent={CLUSTER}}}/nodePools *
    """,
)


class GkeEmulator(RpcEmulator, Named):
    """GKE over REST and gRPC; `kubernetes` serves the clusters' Kubernetes APIs. Satisfies server.Emulator.

    The server must start `kubernetes` first, because `kubernetes` opens the ports of the existing clusters.
    """

    tables = ("container_clusters",)

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
        self._db = db
        self._clusters = Messages(db, "container_clusters", Cluster, not_found="Not found: {name}.")
        self._faults = Switches(db, "container_settings", {"stockout": [], "quota": {}}, methods=names_of(METHODS))
        handlers = Guarded(Faulty(self, self._faults), NEEDS, FURTHER)
        self._services = [rpc.Service("google.container.v1.ClusterManager", METHODS, handlers)]
        self._operations = Operations(db, clock, "GKE", "Not found: {name}.")
        self._operations.carry_out(
            {
                "CREATE_CLUSTER": self._finish_create,
                "DELETE_CLUSTER": self._finish_delete,
                "SET_LABELS": self._finish_set_labels,
            }
        )

    def own_routes(self) -> Sequence[Route]:
        state = Route(
            "GET", f"/v1/projects/{{project}}/services/{SERVICE}", guarded(self._service_state, SERVICE_STATE)
        )
        return [state, self._faults.route("container")]

    async def start(self) -> None:
        self._correct_endpoints()
        self._operations.start()

    async def stop(self) -> None:
        await self._operations.stop()

    def live(self) -> list[str]:
        """The names of all clusters."""
        return self.names_in(self._db)

    def ensure_cluster(self, name: str) -> None:
        """Create a running Autopilot cluster, without a wait or an operation; an existing cluster stays as it is."""
        if self._clusters.find(name) is not None:
            return
        parent, short_name = name.split("/clusters/")
        addons = {"ray_operator_config": {"enabled": True}}  # as terraform/gke.tf has it
        cluster = Cluster(name=short_name, autopilot={"enabled": True}, addons_config=addons)
        rules.check_cluster(cluster, parent.rsplit("/", 1)[1])
        rules.complete(cluster, name, self._config, self._now())
        with self._db.transaction():
            self._kubernetes.add_cluster(name)
            self._connect(cluster, name)
            self._clusters.add(name, cluster, self._clock.now())

    def list_clusters(self, request: Any) -> Any:
        return container_v1.ListClustersResponse.pb()(clusters=self._clusters.list(request.parent))

    def get_cluster(self, request: Any) -> Any:
        return self._clusters.get(request.name)

    def create_cluster(self, request: Any) -> Any:
        cluster, parent = request.cluster, request.parent
        location = parent.rsplit("/", 1)[1]
        rules.check_cluster(cluster, location)
        name = f"{parent}/clusters/{cluster.name}"
        with self._db.transaction():
            if self._clusters.find(name) is not None:
                raise ApiError("ALREADY_EXISTS", f"Already exists: {name}.")
            self._check_quota(parent, location)
            rules.complete(cluster, name, self._config, self._now())
            cluster.status = Status.PROVISIONING
            self._clusters.add(name, cluster, self._clock.now())
            return self._begin("CREATE_CLUSTER", name)

    def delete_cluster(self, request: Any) -> Any:
        with self._db.transaction():
            cluster = self._clusters.get(request.name)
            self._check_idle(request.name)
            cluster.status = Status.STOPPING
            self._clusters.put(request.name, cluster)
            return self._begin("DELETE_CLUSTER", request.name)

    def set_labels(self, request: Any) -> Any:
        with self._db.transaction():
            cluster = self._clusters.get(request.name)
            self._check_idle(request.name)
            if request.label_fingerprint != cluster.label_fingerprint:
                raise ApiError("FAILED_PRECONDITION", "Labels could not be set due to fingerprint mismatch.")
            labels = dict(request.resource_labels)
            rules.check_labels(labels)
            cluster.resource_labels.clear()
            cluster.resource_labels.update(labels)
            cluster.label_fingerprint = rules.fingerprint(labels)
            self._clusters.put(request.name, cluster)
            return self._begin("SET_LABELS", request.name)

    def list_operations(self, request: Any) -> Any:
        operations, _ = self._operations.page(request.parent)
        return container_v1.ListOperationsResponse.pb()(operations=map(operation_message, operations))

    def get_operation(self, request: Any) -> Any:
        return operation_message(self._operations.get(request.name))

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
        self._clusters.get(request.parent)
        return container_v1.ListNodePoolsResponse.pb()()

    def create_node_pool(self, request: Any) -> Any:
        self._clusters.get(request.parent)
        raise ApiError("INVALID_ARGUMENT", "Autopilot clusters do not support mutating node pools.")

    def _check_quota(self, parent: str, location: str) -> None:
        quota = self._faults.get("quota").get(location, self._config.clusters_per_location)
        used = len(self._clusters.list(parent))
        if used >= quota:
            raise ApiError(
                "PERMISSION_DENIED",
                'Insufficient regional quota to satisfy request: resource "GKE_CLUSTERS": request requires '
                f"'1.0' and is short '1.0'. project has a quota of '{quota}' with '{max(quota - used, 0)}' available.",
            )

    def _check_idle(self, name: str) -> None:
        """Refuse a second operation on a cluster, as GKE does."""
        for operation in self._operations.unfinished(name):
            short = operation.name.rsplit("/", 1)[1]
            raise ApiError("FAILED_PRECONDITION", f"Cluster is running incompatible operation {short}.")

    def _begin(self, verb: str, target: str) -> Any:
        operation_id = f"operation-{int(self._clock.now() * 1000)}-{uuid.uuid4()}"
        return operation_message(self._operations.begin(operation_id, verb, target))

    async def _finish_create(self, operation: Operation) -> None:
        await self._clock.sleep_until(operation.created + self._config.create_seconds)
        name = operation.target
        cluster = self._clusters.get(name)
        if cluster.location in self._faults.get("stockout"):
            self._fail_create(operation, cluster)
            return
        self._kubernetes.add_cluster(name)
        await self._kubernetes.open_cluster(name)
        self._connect(cluster, name)
        with self._db.transaction():
            self._clusters.put(name, cluster)
            self._operations.finish(operation, EMPTY)

    async def _finish_delete(self, operation: Operation) -> None:
        await self._clock.sleep_until(operation.created + self._config.delete_seconds)
        await self._kubernetes.remove_cluster(operation.target)
        with self._db.transaction():
            self._clusters.delete(operation.target)
            self._operations.finish(operation, EMPTY)

    async def _finish_set_labels(self, operation: Operation) -> None:
        """The cluster has its labels since the request; GKE reports the end of the operation later."""
        await self._clock.sleep_until(operation.created + self._config.label_seconds)
        self._operations.finish(operation, EMPTY)

    def _fail_create(self, operation: Operation, cluster: Any) -> None:
        """Fail a create for want of machines: the cluster stays, in ERROR, until a user deletes it."""
        message = (
            f"All cluster resources were brought up, but: only 0 nodes out of 1 have registered; GCE_STOCKOUT: "
            f"ZONE_RESOURCE_POOL_EXHAUSTED in {cluster.location}: does not have enough resources available."
        )
        cluster.status, cluster.status_message = Status.ERROR, message
        cluster.conditions.add(**STOCKOUT, message=message)
        with self._db.transaction():
            self._clusters.put(operation.target, cluster)
            self._operations.fail(operation, "RESOURCE_EXHAUSTED", message)

    def _connect(self, cluster: Any, name: str) -> None:
        """Write the address of a cluster's Kubernetes API into the cluster."""
        cluster.status = Status.RUNNING
        cluster.endpoint = f"{HOST}:{self._kubernetes.port_of(name)}"
        cluster.control_plane_endpoints_config.ip_endpoints_config.enabled = True
        cluster.control_plane_endpoints_config.ip_endpoints_config.public_endpoint = cluster.endpoint
        authority = self._kubernetes.authority_of(name)
        cluster.master_auth.cluster_ca_certificate = base64.b64encode(authority.encode()).decode()

    def _correct_endpoints(self) -> None:
        """Update clusters whose Kubernetes API moved because another program took the port while no stack ran."""
        for name in self.live():
            cluster = self._clusters.get(name)
            if cluster.status == Status.RUNNING and cluster.endpoint != f"{HOST}:{self._kubernetes.port_of(name)}":
                self._connect(cluster, name)
                self._clusters.put(name, cluster)

    def _service_state(self, call: Call) -> dict[str, str]:
        """Service Usage's answer to gcloud, which checks that the API is enabled before it creates a cluster."""
        project = f"projects/{call.names['project']}"
        return {"name": f"{project}/services/{SERVICE}", "parent": project, "state": "ENABLED"}

    def _now(self) -> str:
        return timestamp(self._clock.now())
