"""The Kubernetes API of a GKE cluster, reached with the endpoint that GKE reports and a Google token, no kubeconfig.

Objects are JSON, because the client's typed models refuse fields that a newer server adds. The ledger names them as
Cloud Asset Inventory does: kind `batch.k8s.io/Job`, name
`projects/P/locations/R/clusters/C/k8s/namespaces/NS/batch/jobs/NAME` (the core group has no part in the name).
All functions here raise CloudError.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.settings import Settings

from .classify import (
    classify,
    classify_first_look,
    classify_kubernetes,
    client_errors,
    is_refusal,
    kubernetes_errors,
)
from .clients import TIMEOUT_SECONDS, Clients
from .context import Cloud
from .listing import Entry, Listed, list_places, raise_unlisted, unreachable
from .resource import Resource, check_owner

Object = dict[str, Any]

CLUSTER = "container.googleapis.com/Cluster"
# The version of each API group that dropforge uses.
VERSIONS = {
    "": "v1",
    "apps": "v1",
    "autoscaling": "v2",
    "batch": "v1",
    "gateway.networking.k8s.io": "v1",
    "monitoring.googleapis.com": "v1",
    "networking.gke.io": "v1",
    "networking.k8s.io": "v1",
    "ray.io": "v1",
}
OF_ATTEMPTS = f"{names.MANAGED_BY}=dropforge,{names.ATTEMPT_LABEL}"
PAGE = 500  # objects per request of a listing
GONE_WAIT_SECONDS = 5.0  # small objects are deleted within this time; a later call checks slower objects
LOOK_SECONDS = 0.2

# Lists one cluster, given its API, its full name and the settings.
ListCluster = Callable[["Kubernetes", str, Settings], Iterable[Entry]]


def cluster_name(project: str, location: str, cluster: str) -> str:
    """The full resource name of a cluster."""
    return f"projects/{project}/locations/{location}/clusters/{cluster}"


def resource_of(cluster: str, manifest: Object) -> Resource:
    """The object as the ledger and `plan` name it; `cluster` is the cluster's full name."""
    group = _group(manifest)
    service = group if "." in group else f"{group}.k8s.io".lstrip(".")
    namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
    parts = [cluster, "k8s/namespaces", namespace, *([group] if group else []), _plural(manifest["kind"]), name]
    return Resource(f"{service}/{manifest['kind']}", "/".join(parts), manifest)


def find_cluster(cloud: Cloud, name: str) -> Any:
    """The container_v1.Cluster with that full resource name; None if it does not exist."""
    from google.api_core.exceptions import NotFound

    try:
        return cloud.clients.gke().get_cluster(name=name, timeout=TIMEOUT_SECONDS)
    except NotFound:
        return None
    except client_errors() as error:
        raise classify_first_look(error) from error


def standing_cluster(cloud: Cloud, name: str, field: str) -> Any:
    """The cluster that `field` of a spec, or the deployment, names; None while it is being created."""
    from google.cloud.container_v1 import Cluster

    cluster = find_cluster(cloud, name)
    if cluster is None:
        hint = f"create the cluster (terraform/), or name another cluster in {field}"
        raise CloudError(ErrorClass.CONFIG, f"{name} does not exist", hint)
    if cluster.status in (Cluster.Status.RUNNING, Cluster.Status.RECONCILING):
        return cluster
    if cluster.status == Cluster.Status.PROVISIONING:
        return None
    message = f"{name} is {cluster.status.name}: {conditions_of(cluster)}"
    raise CloudError(ErrorClass.CONFIG, message, f"repair the cluster, or name another cluster in {field}")


def conditions_of(cluster: Any) -> str:
    """Why a cluster does not run, according to GKE."""
    conditions = [f"{condition.code.name}: {condition.message}" for condition in cluster.conditions]
    return "; ".join(conditions) or cluster.status_message or "GKE reports no reason"


def has_endpoint(cluster: Any) -> bool:
    """Whether the cluster has an API to connect to."""
    return bool(_dns_name(cluster) or cluster.endpoint)


def is_of_attempt(cluster: Any) -> bool:
    """Whether a run created the cluster for one attempt: deleting the cluster deletes everything in it."""
    return names.ATTEMPT_LABEL in cluster.resource_labels


def clusters(cloud: Cloud) -> Any:
    """container_v1.ListClustersResponse of the project. Raises CloudError."""
    parent = f"projects/{cloud.settings.project}/locations/-"
    try:
        return cloud.clients.gke().list_clusters(parent=parent, timeout=TIMEOUT_SECONDS)
    except client_errors() as error:
        raise classify(error) from error


def listed(cloud: Cloud, list_cluster: ListCluster, *, is_used: bool) -> Iterator[Listed]:
    """The resources that `list_cluster` lists in each standing cluster that runs. Raises Unlisted at the end.

    This function does not list an attempt's own cluster: only the attempt may work in that cluster, and other
    functions list and delete it as a whole.
    """
    settings = cloud.settings
    from google.cloud.container_v1 import Cluster

    try:
        answer = clusters(cloud)
    except CloudError as error:
        return raise_unlisted(cloud, [error], is_used=is_used)
    running = (Cluster.Status.RUNNING, Cluster.Status.RECONCILING, Cluster.Status.DEGRADED)
    standing = [cluster for cluster in answer.clusters if not is_of_attempt(cluster)]
    usable = [cluster for cluster in standing if cluster.status in running and has_endpoint(cluster)]

    def entries_of(cluster: Any) -> Iterator[Entry]:
        name = cluster_name(settings.project, cluster.location, cluster.name)
        try:
            yield from list_cluster(connect(cloud, cluster), name, settings)
        except CloudError as error:
            yield CloudError(error.error_class, f"{name}: {error.message}", error.hint)

    yield from list_places(cloud, usable, entries_of)
    raise_unlisted(cloud, unreachable(answer.missing_zones, "clusters"), is_used=is_used)


def orphans(items: Iterable[Object], kind: str, owners: Iterable[Object]) -> list[Object]:
    """The items without an owner, or with an owner of `kind` that is not among `owners`.

    List the items before the owners: then an owner that ends between the two lists only causes one more check.
    """
    live = {owner["metadata"]["uid"] for owner in owners}

    def is_orphan(item: Object) -> bool:
        references = item["metadata"].get("ownerReferences") or []
        return all(owner["kind"] == kind and owner["uid"] not in live for owner in references)

    return [item for item in items if is_orphan(item)]


def listed_of(cluster: str, item: Object) -> Listed:
    """An object of a cluster as a listed resource."""
    resource, metadata = resource_of(cluster, item), item["metadata"]
    created = datetime.fromisoformat(metadata["creationTimestamp"])
    return Listed(resource.kind, resource.name, dict(metadata.get("labels", {})), created)


def connect(cloud: Cloud, cluster: Any) -> Kubernetes:
    """The API of a cluster with an endpoint: by its DNS name if external traffic may use it, else by its address."""
    if dns := _dns_name(cluster):  # IAM guards the DNS endpoint, and a public authority signs its certificate
        return Kubernetes(cloud.clients, f"https://{dns}")
    authority = b64decode(cluster.master_auth.cluster_ca_certificate).decode()
    return Kubernetes(cloud.clients, f"https://{cluster.endpoint}", authority)


def exists(cloud: Cloud, name: str) -> bool:
    """Whether the object with that full resource name exists. True also while the cluster's API cannot be reached."""
    cluster = find_cluster(cloud, name.partition("/k8s/")[0])
    if cluster is None:
        return False
    return not has_endpoint(cluster) or connect(cloud, cluster).get(name) is not None


def delete(cloud: Cloud, name: str, of_it: str = "", plural: str = "pods") -> bool:
    """Delete the object with that full resource name; True once it does not exist, alone or with its cluster.

    Kubernetes deletes the objects that it owns first. `of_it` selects its pods, or its other objects of the core group
    (`plural`), by label, to delete orphans as well. An object in an attempt's own cluster is deleted only with the
    cluster: the control plane has no permission inside. The answer stays False while another operation delays the
    deletion of the cluster.
    """
    from google.cloud.container_v1 import Cluster

    cluster = find_cluster(cloud, name.partition("/k8s/")[0])
    if cluster is None:
        return True
    if cluster.status == Cluster.Status.STOPPING or is_of_attempt(cluster):
        return False
    if cluster.status == Cluster.Status.PROVISIONING or not has_endpoint(cluster):
        return True  # nothing is created in a cluster before it runs
    kubernetes = connect(cloud, cluster)
    deadline = cloud.clock.monotonic() + GONE_WAIT_SECONDS
    while remaining := _remaining(kubernetes, name, of_it, plural):
        for full_name, item in remaining:
            if "deletionTimestamp" not in item["metadata"]:
                kubernetes.delete(full_name, item["metadata"]["uid"])
        if cloud.clock.monotonic() > deadline:  # only now: the deletion starts even if the first look took longer
            return False
        cloud.clock.sleep(LOOK_SECONDS)
    return True


@dataclass(frozen=True)
class Kubernetes:
    """The API at `host`, an https URL. An object's name is its full resource name, as in the ledger."""

    clients: Clients
    host: str
    authority: str = ""

    def get(self, name: str) -> Object | None:
        """The object with that name; None if it does not exist."""
        return self._call("GET", _path(name), none_for=404)

    def find(self, namespace: str, plural: str, group: str = "", **selectors: str) -> list[Object]:
        """Objects of one kind: `find("ns", "pods", labelSelector="a=b")`; none if the cluster lacks the kind."""
        path = _collection(group, VERSIONS[group], namespace, plural)
        answer = self._call("GET", path, query=list(selectors.items()), none_for=404)
        return list((answer or {}).get("items") or [])

    def each(self, namespace: str, version: str, kind: str, selector: str) -> Iterator[Object]:
        """Objects of one kind by label, page by page, with the apiVersion and kind that the API's list leaves out."""
        path = _collection(version.rpartition("/")[0], version, namespace, _plural(kind))
        query = [("labelSelector", selector), ("limit", str(PAGE))]
        following = ""
        while True:
            page = self._call("GET", path, query=[*query, *([("continue", following)] * bool(following))], none_for=404)
            for item in (page or {}).get("items") or []:
                yield {"apiVersion": version, "kind": kind, **item}
            following = (page or {}).get("metadata", {}).get("continue", "")
            if not following:
                return

    def create(self, manifest: Object) -> bool:
        """Create an object; False if an object of that name exists."""
        namespace = manifest["metadata"].get("namespace")
        path = _collection(_group(manifest), manifest["apiVersion"], namespace, _plural(manifest["kind"]))
        return self._call("POST", path, body=manifest, none_for=409) is not None

    def ensure(self, cluster: str, manifest: Object) -> None:
        """Create an object of a run, unless an earlier call, whose reply was lost, created it."""
        if self.create(manifest):
            return
        name, wanted = resource_of(cluster, manifest).name, manifest["metadata"]["labels"]
        existing = self.get(name)
        if existing is not None:
            check_owner(name, existing["metadata"].get("labels", {}), wanted[names.RUN_LABEL])

    def patch(self, name: str, change: Object) -> bool:
        """Merge `change` into the object with that name; False if its resourceVersion is not that of `change`.

        https://kubernetes.io/docs/reference/using-api/api-concepts/#patch-and-update
        """
        changed = self._call("PATCH", _path(name), body=change, none_for=409, sends="application/merge-patch+json")
        return changed is not None

    def delete(self, name: str, uid: str) -> None:
        """Start to delete the object with that name and uid, and the objects it owns. A missing object is a success."""
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        # 409: another object has this name now; the caller looks again.
        self._call("DELETE", _path(name), body=body, none_for=(404, 409))

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: list[tuple[str, str]] | None = None,
        body: Object | None = None,
        none_for: int | tuple[int, ...] = (),
        sends: str = "application/json",
    ) -> Object | None:
        """The answer of the API; None for the HTTP statuses in `none_for`. Raises CloudError for other errors."""
        api = self.clients.kubernetes(self.host, self.authority)
        headers = {"Accept": "application/json", "Content-Type": sends}
        try:
            request = api.param_serialize(
                method, path, query_params=query or [], header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response: Any = api.call_api(*request, _request_timeout=TIMEOUT_SECONDS)
            text = response.read()
            if response.status in (none_for if isinstance(none_for, tuple) else (none_for,)):
                return None
            _raise_for_status(response)
        except kubernetes_errors() as error:
            failure = classify_kubernetes(error)
            failure.did_nothing = method == "POST" and is_refusal(getattr(error, "status", None))
            raise failure from error
        answer: Object = json.loads(text)
        return answer


def _dns_name(cluster: Any) -> str:
    dns = cluster.control_plane_endpoints_config.dns_endpoint_config
    return str(dns.endpoint) if dns.allow_external_traffic else ""


def _remaining(kubernetes: Kubernetes, name: str, of_it: str, plural: str) -> list[tuple[str, Object]]:
    """The object with its full name, if it exists; otherwise its pods, or other objects, with theirs."""
    if (itself := kubernetes.get(name)) is not None:
        return [(name, itself)]
    if not of_it:
        return []
    cluster, _, rest = name.partition("/k8s/namespaces/")
    namespace = rest.partition("/")[0]
    remaining = kubernetes.find(namespace, plural, labelSelector=of_it)
    return [(f"{cluster}/k8s/namespaces/{namespace}/{plural}/{item['metadata']['name']}", item) for item in remaining]


def _raise_for_status(response: Any) -> None:
    from kubernetes.client.exceptions import ApiException

    if not 200 <= response.status < 300:
        raise ApiException(http_resp=response)


def _path(name: str) -> str:
    """The path of an object in the API, from its full resource name."""
    namespace, *group, plural, last = name.partition("/k8s/namespaces/")[2].split("/")
    version = VERSIONS["".join(group)]
    return f"{_collection(''.join(group), version, namespace, plural)}/{last}"


def _collection(group: str, version: str, namespace: str | None, plural: str) -> str:
    root = f"/apis/{group}" if group else "/api"
    return f"{root}/{version.rpartition('/')[2]}/" + (f"namespaces/{namespace}/" if namespace else "") + plural


def _group(manifest: Object) -> str:
    return str(manifest["apiVersion"].rpartition("/")[0])


def _plural(kind: str) -> str:
    kind = kind.lower()
    if kind.endswith("y") and not kind.endswith(("ay", "ey", "oy", "uy")):
        return f"{kind[:-1]}ies"
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"
