"""The Kubernetes API of a GKE cluster, reached by what GKE says of it: its endpoint and a Google token, no kubeconfig.

Objects are JSON as the API has it, because the client's typed models refuse what a newer server adds. They are named in
the ledger as Cloud Asset Inventory names them: kind `batch.k8s.io/Job`, name
`projects/P/locations/R/clusters/C/k8s/namespaces/NS/batch/jobs/NAME` (the core group has no part of its own).
Everything here raises CloudError.
"""

from __future__ import annotations

import json
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.settings import Settings

from . import clients
from .classify import classify, classify_kubernetes, client_errors, kubernetes_errors
from .clients import TIMEOUT_SECONDS
from .listing import Found, Listed, each, settle, unreachable
from .resource import Resource, check_owner

Object = dict[str, Any]

CLUSTER = "container.googleapis.com/Cluster"
# Of each group, the one that we speak.
VERSIONS = {
    "": "v1",
    "apps": "v1",
    "autoscaling": "v2",
    "batch": "v1",
    "monitoring.googleapis.com": "v1",
    "ray.io": "v1",
}
OF_ATTEMPTS = f"{names.MANAGED_BY}=dropforge,{names.ATTEMPT_LABEL}"
PAGE = 500  # objects per request of a listing
GONE_WAIT_SECONDS = 5.0  # what is small is gone within this; the rest is looked at again later
LOOK_SECONDS = 0.2


# What is listed in one cluster, by its API, its full name and the settings.
Look = Callable[["Kubernetes", str, Settings], Iterable[Found]]


def cluster_name(project: str, location: str, cluster: str) -> str:
    """The full resource name of a cluster."""
    return f"projects/{project}/locations/{location}/clusters/{cluster}"


def resource_of(cluster: str, manifest: Object) -> Resource:
    """What the ledger and `plan` call an object of the cluster with that full name."""
    group = _group(manifest)
    service = group if "." in group else f"{group}.k8s.io".lstrip(".")
    namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
    parts = [cluster, "k8s/namespaces", namespace, *([group] if group else []), _plural(manifest), name]
    return Resource(f"{service}/{manifest['kind']}", "/".join(parts), manifest)


def find_cluster(name: str) -> Any:
    """The container_v1.Cluster with that full resource name; None when there is none."""
    from google.api_core.exceptions import NotFound

    try:
        return clients.gke().get_cluster(name=name, timeout=TIMEOUT_SECONDS)
    except NotFound:
        return None
    except client_errors() as error:
        raise classify(error) from error


def standing_cluster(name: str, field: str) -> Any:
    """The cluster that `field` of a spec, or the deployment, names; None while it is being made."""
    from google.cloud.container_v1 import Cluster

    cluster = find_cluster(name)
    if cluster is None:
        hint = f"make it (terraform/), or name another one in {field}"
        raise CloudError(ErrorClass.CONFIG, f"{name} does not exist", hint)
    if cluster.status in (Cluster.Status.RUNNING, Cluster.Status.RECONCILING):
        return cluster
    if cluster.status == Cluster.Status.PROVISIONING:
        return None
    message = f"{name} is {cluster.status.name}: {conditions_of(cluster)}"
    raise CloudError(ErrorClass.CONFIG, message, f"repair the cluster, or name another one in {field}")


def conditions_of(cluster: Any) -> str:
    """What GKE says of a cluster that does not run."""
    told = [f"{condition.code.name}: {condition.message}" for condition in cluster.conditions]
    return "; ".join(told) or cluster.status_message or "GKE does not say why"


def has_endpoint(cluster: Any) -> bool:
    """Whether there is an API to connect to."""
    return bool(_dns_name(cluster) or cluster.endpoint)


def is_of_attempt(cluster: Any) -> bool:
    """Whether a run has made the cluster for one attempt: whatever is in it goes with it."""
    return names.ATTEMPT_LABEL in cluster.resource_labels


def clusters(settings: Settings) -> Any:
    """container_v1.ListClustersResponse of the project. Raises CloudError."""
    parent = f"projects/{settings.project}/locations/-"
    try:
        return clients.gke().list_clusters(parent=parent, timeout=TIMEOUT_SECONDS)
    except client_errors() as error:
        raise classify(error) from error


def listed(settings: Settings, look: Look, *, is_used: bool) -> Iterator[Listed]:
    """What `look` finds in each cluster of the project that can be looked into. Raises Unlisted at the end.

    Those of an attempt are not: only who works in them may do so, and they are listed, and deleted, whole.
    """
    from google.cloud.container_v1 import Cluster

    try:
        answer = clusters(settings)
    except CloudError as error:
        return settle([error], is_used=is_used)
    running = (Cluster.Status.RUNNING, Cluster.Status.RECONCILING, Cluster.Status.DEGRADED)
    standing = [cluster for cluster in answer.clusters if not is_of_attempt(cluster)]
    usable = [cluster for cluster in standing if cluster.status in running and has_endpoint(cluster)]

    def look_into(cluster: Any) -> Iterator[Found]:
        name = cluster_name(settings.project, cluster.location, cluster.name)
        try:
            yield from look(connect(cluster), name, settings)
        except CloudError as error:
            yield CloudError(error.error_class, f"{name}: {error.message}", error.hint)

    yield from each(usable, look_into)
    settle(unreachable(answer.missing_zones, "clusters"), is_used=is_used)


def orphans(items: Iterable[Object], kind: str, owners: Iterable[Object]) -> list[Object]:
    """Those of the items that nothing owns, or an object of `kind` that is not among the owners.

    List the items first: an owner that ends in between then costs nothing but a second look.
    """
    live = {owner["metadata"]["uid"] for owner in owners}
    made = [(one, one["metadata"].get("ownerReferences") or []) for one in items]
    return [one for one, by in made if all(owner["kind"] == kind and owner["uid"] not in live for owner in by)]


def listed_of(cluster: str, item: Object) -> Listed:
    """An object of a cluster, as listings have it."""
    resource, metadata = resource_of(cluster, item), item["metadata"]
    created = datetime.fromisoformat(metadata["creationTimestamp"])
    return Listed(resource.kind, resource.name, dict(metadata.get("labels", {})), created)


def connect(cluster: Any) -> Kubernetes:
    """The API of a cluster that has an endpoint: by its DNS name where that is open to us, else by its address."""
    if dns := _dns_name(cluster):  # IAM guards it, and its certificate is a public one
        return Kubernetes(f"https://{dns}")
    authority = b64decode(cluster.master_auth.cluster_ca_certificate).decode()
    return Kubernetes(f"https://{cluster.endpoint}", authority)


def exists(name: str) -> bool:
    """Whether there is an object with that full resource name, or a cluster that cannot be asked for it now."""
    cluster = find_cluster(name.partition("/k8s/")[0])
    if cluster is None:
        return False
    return not has_endpoint(cluster) or connect(cluster).get(name) is not None


def delete(name: str, pods: str = "") -> bool:
    """Delete the object with that full resource name; True once it is seen not to exist, alone or with its cluster.

    What it owns goes first. `pods` selects its pods by label: those that somebody has orphaned are deleted as well.
    In a cluster of its attempt it is not asked for: nobody who deletes may, while another operation keeps the cluster.
    """
    from google.cloud.container_v1 import Cluster

    cluster = find_cluster(name.partition("/k8s/")[0])
    if cluster is None:
        return True
    if cluster.status == Cluster.Status.STOPPING or is_of_attempt(cluster):
        return False
    if cluster.status == Cluster.Status.PROVISIONING or not has_endpoint(cluster):
        return True  # nothing is made in a cluster before it runs
    kubernetes = connect(cluster)
    deadline = time.monotonic() + GONE_WAIT_SECONDS
    while left := _left(kubernetes, name, pods):
        for one, found in left:
            if "deletionTimestamp" not in found["metadata"]:
                kubernetes.delete(one, found["metadata"]["uid"])
        if time.monotonic() > deadline:  # after it was asked for once, however long the look has taken
            return False
        time.sleep(LOOK_SECONDS)
    return True


@dataclass(frozen=True)
class Kubernetes:
    """The API at `host`, an https URL. Objects are found by their full resource names, in the ledger's form."""

    host: str
    authority: str = ""

    def get(self, name: str) -> Object | None:
        """One object; None when it does not exist."""
        return self._call("GET", _path(name), none_for=404)

    def find(self, namespace: str, plural: str, group: str = "", **selectors: str) -> list[Object]:
        """Objects of one kind: `find("ns", "pods", labelSelector="a=b")`; none of a kind that the cluster lacks."""
        path = _collection(group, VERSIONS[group], namespace, plural)
        found = self._call("GET", path, query=list(selectors.items()), none_for=404)
        return list((found or {}).get("items") or [])

    def each(self, namespace: str, version: str, kind: str, selector: str) -> Iterator[Object]:
        """Objects of one kind by label, with their apiVersion and kind, which a list does not repeat; page by page."""
        path = _collection(version.rpartition("/")[0], version, namespace, f"{kind.lower()}s")
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
        """Create an object; False when one of that name exists."""
        namespace = manifest["metadata"].get("namespace")
        path = _collection(_group(manifest), manifest["apiVersion"], namespace, _plural(manifest))
        return self._call("POST", path, body=manifest, none_for=409) is not None

    def ensure(self, cluster: str, manifest: Object) -> None:
        """Create an object of one of our runs, or find it made by an earlier call whose reply was lost."""
        if self.create(manifest):
            return
        name, wanted = resource_of(cluster, manifest).name, manifest["metadata"]["labels"]
        found = self.get(name)
        if found is not None:
            check_owner(name, found["metadata"].get("labels", {}), wanted[names.RUN_LABEL])

    def delete(self, name: str, uid: str) -> None:
        """Begin to delete the object that was seen with that uid, and what it owns. Gone already is success."""
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        # 409: another object has this name by now; the caller looks again.
        self._call("DELETE", _path(name), body=body, none_for=(404, 409))

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: list[tuple[str, str]] | None = None,
        body: Object | None = None,
        none_for: int | tuple[int, ...] = (),
    ) -> Object | None:
        """What the API answers; None for the codes that stand for an answer too."""
        api = clients.kubernetes(self.host, self.authority)
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        try:
            request = api.param_serialize(
                method, path, query_params=query or [], header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = api.call_api(*request, _request_timeout=TIMEOUT_SECONDS)
            text = response.read()
            if response.status in (none_for if isinstance(none_for, tuple) else (none_for,)):
                return None
            _raise_for_status(response)
        except kubernetes_errors() as error:
            raise classify_kubernetes(error) from error
        answer: Object = json.loads(text)
        return answer


def _dns_name(cluster: Any) -> str:
    dns = cluster.control_plane_endpoints_config.dns_endpoint_config
    return str(dns.endpoint) if dns.allow_external_traffic else ""


def _left(kubernetes: Kubernetes, name: str, pods: str) -> list[tuple[str, Object]]:
    """What is left of an object: itself, or else its pods; with their full names."""
    if (itself := kubernetes.get(name)) is not None:
        return [(name, itself)]
    if not pods:
        return []
    cluster, _, rest = name.partition("/k8s/namespaces/")
    namespace = rest.partition("/")[0]
    found = kubernetes.find(namespace, "pods", labelSelector=pods)
    return [(f"{cluster}/k8s/namespaces/{namespace}/pods/{pod['metadata']['name']}", pod) for pod in found]


def _raise_for_status(response: Any) -> None:
    from kubernetes.client.exceptions import ApiException

    if not 200 <= response.status < 300:
        raise ApiException(http_resp=response)


def _path(name: str) -> str:
    """The API's path of an object, from its full resource name."""
    namespace, *group, plural, last = name.partition("/k8s/namespaces/")[2].split("/")
    version = VERSIONS["".join(group)]
    return f"{_collection(''.join(group), version, namespace, plural)}/{last}"


def _collection(group: str, version: str, namespace: str | None, plural: str) -> str:
    root = f"/apis/{group}" if group else "/api"
    return f"{root}/{version.rpartition('/')[2]}/" + (f"namespaces/{namespace}/" if namespace else "") + plural


def _group(manifest: Object) -> str:
    return str(manifest["apiVersion"].rpartition("/")[0])


def _plural(manifest: Object) -> str:
    return f"{manifest['kind'].lower()}s"  # of all kinds that we use
