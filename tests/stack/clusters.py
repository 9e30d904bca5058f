"""Read and delete objects in the stack's clusters with plain Kubernetes requests, without the code under test."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

from google.auth.credentials import AnonymousCredentials
from google.cloud import container_v1

from dropforge.base import names
from dropforge_local.stack.config import StackInfo

# The API group of each kind that a run may create; the key is the kind's part of a ledger entry's name.
APIS = {
    "batch/jobs": "apis/batch/v1",
    "apps/deployments": "apis/apps/v1",
    "ray.io/rayjobs": "apis/ray.io/v1",
    "ray.io/rayclusters": "apis/ray.io/v1",
    "services": "api/v1",
    "pods": "api/v1",
    "autoscaling/horizontalpodautoscalers": "apis/autoscaling/v2",
    "monitoring.googleapis.com/podmonitorings": "apis/monitoring.googleapis.com/v1",
    "gateway.networking.k8s.io/httproutes": "apis/gateway.networking.k8s.io/v1",
    "networking.gke.io/gcpbackendpolicies": "apis/networking.gke.io/v1",
    "networking.gke.io/healthcheckpolicies": "apis/networking.gke.io/v1",
}


class Clusters:
    """The clusters of a running stack."""

    def __init__(self, info: StackInfo) -> None:
        options = {"api_endpoint": info.environment["GKE_EMULATOR_HOST"]}
        self.gke = container_v1.ClusterManagerClient(
            transport="rest", client_options=options, credentials=AnonymousCredentials()
        )
        self._project = info.project
        self._token = info.environment["DROPFORGE_EMULATOR_TOKEN"]

    def names(self) -> Iterator[tuple[str, Any]]:
        """Yield the full name of each cluster, and the cluster."""
        for cluster in self.gke.list_clusters(parent=f"projects/{self._project}/locations/-").clusters:
            yield cluster.self_link.partition("/v1/")[2], cluster

    def of_endpoint(self, endpoint: str) -> list[str]:
        """Return the objects of a named endpoint in all clusters, by their full names."""
        label = f"{names.ENDPOINT_LABEL}%3D{endpoint}"
        return [
            f"{name}/k8s/{path}"
            for name, cluster in self.names()
            if cluster.endpoint
            for path in self._objects(cluster, label)
        ]

    def of_run(self, run: str) -> list[str]:
        """Return a run's own clusters and its objects in all clusters, by their names in the ledger."""
        resources = []
        for name, cluster in self.names():
            if cluster.resource_labels.get(names.RUN_LABEL) == run:
                resources.append(name)
            if cluster.endpoint:
                resources += [f"{name}/k8s/{path}" for path in self._objects(cluster, f"{names.RUN_LABEL}%3D{run}")]
        return resources

    def pods(self, run: str) -> Iterator[tuple[str, str]]:
        """Yield (cluster, "namespace/name") for each pod of a run."""
        for name in self.of_run(run):
            if "/pods/" in name:
                cluster, _, rest = name.partition("/k8s/namespaces/")
                yield cluster, rest.replace("/pods/", "/")

    def call(self, cluster: Any, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a request to a cluster's API; return the JSON of the response. Raises HTTPError."""
        authority = b64decode(cluster.master_auth.cluster_ca_certificate).decode()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://{cluster.endpoint}/{path}", data, headers, method=method)
        with urllib.request.urlopen(
            request, timeout=20, context=ssl.create_default_context(cadata=authority)
        ) as answer:
            return dict(json.load(answer))

    def get(self, name: str) -> dict[str, Any] | None:
        """Return an object by its full name, or None if it does not exist."""
        try:
            return self._act("GET", name)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise

    def delete(self, name: str) -> None:
        """Delete an object by its full name, with the propagation policy of `kubectl delete`."""
        self._act("DELETE", name, {"propagationPolicy": "Background"})

    def _act(self, method: str, name: str, body: Any = None) -> dict[str, Any]:
        cluster, _, rest = name.partition("/k8s/namespaces/")
        namespace, _, rest = rest.partition("/")
        kind, _, short_name = rest.rpartition("/")
        path = f"{APIS[kind]}/namespaces/{namespace}/{kind.rpartition('/')[2]}/{short_name}"
        return self.call(self.gke.get_cluster(name=cluster), method, path, body)

    def _objects(self, cluster: Any, label: str) -> Iterator[str]:
        for kind, api in APIS.items():
            path = f"{api}/{kind.rpartition('/')[2]}?labelSelector={label}"
            for item in self.call(cluster, "GET", path)["items"]:
                metadata = item["metadata"]
                yield f"namespaces/{metadata['namespace']}/{kind}/{metadata['name']}"
