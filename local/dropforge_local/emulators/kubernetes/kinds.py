"""The kinds of objects that the API server knows, and their names in paths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A resource type. `schema` names its table in types.py; a custom resource without schema is stored as given."""

    group: str
    version: str
    name: str
    plural: str
    short: tuple[str, ...] = ()
    namespaced: bool = True
    schema: str = ""
    subresources: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name in error messages and in the database: `jobs.batch`, `pods`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def has_status(self) -> bool:
        return "status" in self.subresources


def _builtin(group: str, version: str, name: str, plural: str, short: str = "", **fields: object) -> Kind:
    words = {key: tuple(str(value).split()) for key, value in fields.items() if key in ("subresources", "categories")}
    namespaced = bool(fields.get("namespaced", True))
    return Kind(group, version, name, plural, tuple(short.split()), namespaced, schema=name, **words)


POD = _builtin("", "v1", "Pod", "pods", "po", subresources="status log proxy exec portforward", categories="all")
SERVICE = _builtin("", "v1", "Service", "services", "svc", subresources="status proxy", categories="all")
CONFIG_MAP = _builtin("", "v1", "ConfigMap", "configmaps", "cm")
SECRET = _builtin("", "v1", "Secret", "secrets")
SERVICE_ACCOUNT = _builtin("", "v1", "ServiceAccount", "serviceaccounts", "sa")
EVENT = _builtin("", "v1", "Event", "events", "ev")
CLAIM = _builtin("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims", "pvc", subresources="status")
VOLUME = _builtin("", "v1", "PersistentVolume", "persistentvolumes", "pv", namespaced=False, subresources="status")
NODE = _builtin("", "v1", "Node", "nodes", "no", namespaced=False, subresources="status")
NAMESPACE = _builtin("", "v1", "Namespace", "namespaces", "ns", namespaced=False, subresources="status finalize")
JOB = _builtin("batch", "v1", "Job", "jobs", subresources="status", categories="all")
DEPLOYMENT = _builtin(
    "apps", "v1", "Deployment", "deployments", "deploy", subresources="status scale", categories="all"
)
REPLICA_SET = _builtin("apps", "v1", "ReplicaSet", "replicasets", "rs", subresources="status scale", categories="all")
HPA = _builtin(
    "autoscaling",
    "v2",
    "HorizontalPodAutoscaler",
    "horizontalpodautoscalers",
    "hpa",
    subresources="status",
    categories="all",
)
STORAGE_CLASS = _builtin("storage.k8s.io", "v1", "StorageClass", "storageclasses", "sc", namespaced=False)
NETWORK_POLICY = _builtin("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", "netpol")
LEASE = _builtin("coordination.k8s.io", "v1", "Lease", "leases")
POD_MONITORING = Kind(
    "monitoring.googleapis.com", "v1", "PodMonitoring", "podmonitorings", ("pmon",), subresources=("status",)
)
GATEWAY = _builtin("gateway.networking.k8s.io", "v1", "Gateway", "gateways", "gtw", subresources="status")
HTTP_ROUTE = _builtin("gateway.networking.k8s.io", "v1", "HTTPRoute", "httproutes", subresources="status")
BACKEND_POLICY = _builtin("networking.gke.io", "v1", "GCPBackendPolicy", "gcpbackendpolicies", subresources="status")
GATEWAY_POLICY = _builtin("networking.gke.io", "v1", "GCPGatewayPolicy", "gcpgatewaypolicies", subresources="status")
HEALTH_POLICY = _builtin("networking.gke.io", "v1", "HealthCheckPolicy", "healthcheckpolicies", subresources="status")
RAY_JOB = _builtin("ray.io", "v1", "RayJob", "rayjobs", subresources="status", categories="all")
RAY_CLUSTER = _builtin("ray.io", "v1", "RayCluster", "rayclusters", subresources="status", categories="all")

KINDS = (
    NAMESPACE, NODE, POD, SERVICE, CONFIG_MAP, SECRET, SERVICE_ACCOUNT, EVENT, CLAIM, VOLUME, DEPLOYMENT, REPLICA_SET,
    JOB, HPA, STORAGE_CLASS, NETWORK_POLICY, LEASE, POD_MONITORING, GATEWAY, HTTP_ROUTE, BACKEND_POLICY,
    GATEWAY_POLICY, HEALTH_POLICY, RAY_JOB, RAY_CLUSTER,
)  # fmt: skip
BY_PATH = {(kind.group, kind.version, kind.plural): kind for kind in KINDS}
BY_KEY = {kind.key: kind for kind in KINDS}
BY_NAME = {(kind.api_version, kind.name): kind for kind in KINDS}
