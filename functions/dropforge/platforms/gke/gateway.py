"""A named endpoint as a route of the Gateway that all endpoints of a cluster share: requests are split by weights.

The Gateway (terraform/kubernetes.tf) is a regional internal Application Load Balancer with one address. A route takes
the requests below /NAME/v1 to the Services of the revisions, by their weights; and a route of each revision takes those
below /revisions/REVISION/v1 to it, so that the same load balancer has reached a revision before it gets a share.
Both replace the path by /v1. They never replace by "/": Envoy would forward //v1
(https://github.com/kubernetes-sigs/wg-ai-gateway/pull/38).
Routes: https://gateway-api.sigs.k8s.io/reference/spec/#httproute
Policies: https://cloud.google.com/kubernetes-engine/docs/how-to/configure-gateway-resources
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud import monitoring
from dropforge.cloud.classify import classify, client_errors
from dropforge.cloud.context import Cloud
from dropforge.cloud.kubernetes import Kubernetes, Object
from dropforge.platforms.named import Counted, Share, count, owner_labels
from dropforge.platforms.serving import Deployment

from .front import Kinds, Urls, sibling
from .workload import KINDS, PORT, Workload, manifests

GATEWAY = "endpoints"  # of terraform/kubernetes.tf
CONTROLLER = "networking.gke.io/gateway"
ROUTES = "gateway.networking.k8s.io/httproutes"
SEEN = "dropforge/programmed"  # annotation: the generation that the load balancer has, and since when, as was seen
NEGS = "cloud.google.com/neg-status"  # annotation: GKE's groups of the pods of a Service
ANSWER_SECONDS = 600  # for an answer; without a policy, the load balancer cuts it after 30 s
DRAIN_SECONDS = 300  # for the answers of a pod that ends, as long as the pod itself has (named.py)
REQUESTS = "loadbalancing.googleapis.com/https/internal/request_count"
LATENCIES = "loadbalancing.googleapis.com/https/internal/backend_latencies"
GROUP, STATUS = "resource.label.backend_name", "metric.label.response_code_class"
SERVER_ERROR = "500"  # the class of the statuses from 500; Cloud Run's metric calls it 5xx


class WeightedRoute:
    """See `Front` for the contract of each verb."""

    kinds: Kinds = (
        *KINDS,
        ("gateway.networking.k8s.io/v1", "HTTPRoute"),
        ("networking.gke.io/v1", "GCPBackendPolicy"),
        ("networking.gke.io/v1", "HealthCheckPolicy"),
    )
    whole: str = ""

    def check(self, api: Kubernetes, service: str) -> None:
        if api.get(_gateway(service)) is None:
            message = f"{_gateway(service)} does not exist"
            raise CloudError(ErrorClass.CONFIG, message, "apply the output kubernetes_manifest of Terraform again")

    def parts(self, workload: Workload) -> list[Object]:
        prefix = f"/revisions/{workload.name}"
        route = _route(workload.name, workload.labels, workload.deployment, prefix, {workload.name: 1})
        return [*manifests(workload, has_address=False), *_policies(workload), route]

    def manifest(self, deployment: Deployment, selected: str) -> Object:
        name, labels = names.named_endpoint(deployment.endpoint), owner_labels(deployment.settings, deployment.endpoint)
        return _route(name, labels, deployment, f"/{deployment.endpoint}", {selected: 100})

    def urls(self, api: Kubernetes, service: str, revision: str) -> Urls | None:
        gateway, own, endpoint = api.get(_gateway(service)), api.get(_own_route(service, revision)), api.get(service)
        if own is None or endpoint is None:
            return None
        addresses = (gateway or {}).get("status", {}).get("addresses") or [{}]
        if not (address := addresses[0].get("value")):
            return None
        return Urls(f"http://{address}/revisions/{revision}", f"http://{address}{_prefix(endpoint)}")

    def is_reached(self, api: Kubernetes, service: str, revision: str) -> bool:
        own = api.get(_own_route(service, revision))
        return own is not None and _is_programmed(own)

    def shares(self, found: Object) -> dict[str, int]:
        return {ref["name"]: ref.get("weight", 1) for rule in found["spec"]["rules"] for ref in rule["backendRefs"]}

    def wanted(self, api: Kubernetes, service: str, shares: list[Share]) -> dict[str, int]:
        # A revision without a share is named, too, so that its load balancer stays warm for a rollback. A name without
        # a Service would make the whole route invalid.
        def is_there(share: Share) -> bool:
            return bool(share.percent) or api.get(sibling(service, "services", share.revision)) is not None

        return {share.revision: share.percent for share in shares if is_there(share)}

    def change(self, found: Object, wanted: dict[str, int]) -> Object:
        return {"spec": {"rules": [_rule(_prefix(found), wanted)]}}

    def has_moved(self, cloud: Cloud, api: Kubernetes, service: str, found: Object) -> bool:
        # The conditions tell that the load balancer has the weights, and not that each of its proxies has them. They do
        # not tell since when: a condition keeps its time while its status stays true.
        if not _is_programmed(found):
            return False
        now, generation = cloud.clock.now(), str(found["metadata"]["generation"])
        seen, _, since = found["metadata"].get("annotations", {}).get(SEEN, "").partition(" ")
        if seen != generation:
            api.patch(service, {"metadata": {"annotations": {SEEN: f"{generation} {now.isoformat()}"}}})
            return False
        return now - datetime.fromisoformat(since) >= timedelta(seconds=cloud.settings.endpoint_settle_seconds)

    def counted(self, cloud: Cloud, services: Iterable[Object], since: datetime) -> dict[str, Counted]:
        revision_of = {group: item["metadata"]["name"] for item in services for group in _groups(item)}
        try:
            return _counted(cloud, revision_of, since) if revision_of else {}
        except client_errors() as error:
            raise classify(error) from error


def _route(name: str, labels: dict[str, str], deployment: Deployment, prefix: str, weights: dict[str, int]) -> Object:
    """gateway.networking.k8s.io/v1 HTTPRoute."""
    metadata = {"name": name, "namespace": deployment.settings.kubernetes_namespace, "labels": labels}
    spec = {"parentRefs": [{"name": GATEWAY}], "rules": [_rule(prefix, weights)]}
    return {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": metadata, "spec": spec}


def _rule(prefix: str, weights: dict[str, int]) -> Object:
    path = {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/v1"}
    return {
        "matches": [{"path": {"type": "PathPrefix", "value": f"{prefix}/v1"}}],
        "filters": [{"type": "URLRewrite", "urlRewrite": {"path": path}}],
        "backendRefs": [{"name": name, "port": PORT, "weight": weight} for name, weight in weights.items()],
    }


def _policies(workload: Workload) -> Iterator[Object]:
    """networking.gke.io/v1 GCPBackendPolicy and HealthCheckPolicy of a revision's Service.

    Without them an answer is cut after 30 s, an ending pod loses its answers, and pods are healthy if `/` answers 200.
    """
    backend = {"timeoutSec": ANSWER_SECONDS, "connectionDraining": {"drainingTimeoutSec": DRAIN_SECONDS}}
    check = {"type": "HTTP", "httpHealthCheck": {"requestPath": "/health"}}
    health = {"checkIntervalSec": 5, "timeoutSec": 5, "healthyThreshold": 1, "unhealthyThreshold": 3, "config": check}
    metadata = {
        "name": workload.name,
        "namespace": workload.deployment.settings.kubernetes_namespace,
        "labels": workload.labels,
    }
    target = {"group": "", "kind": "Service", "name": workload.name}
    for kind, default in (("GCPBackendPolicy", backend), ("HealthCheckPolicy", health)):
        spec = {"default": default, "targetRef": target}
        yield {"apiVersion": "networking.gke.io/v1", "kind": kind, "metadata": metadata, "spec": spec}


def _is_programmed(route: Object) -> bool:
    """Whether the load balancer has taken the present state of a route, as the controller of GKE tells."""
    wanted, generation = {"Accepted", "ResolvedRefs", "Reconciled"}, route["metadata"]["generation"]
    for parent in route.get("status", {}).get("parents") or ():
        done = {
            each["type"]
            for each in parent.get("conditions", ())
            if each["status"] == "True" and each.get("observedGeneration", 0) >= generation
        }
        if parent.get("controllerName") == CONTROLLER and wanted <= done:
            return True
    return False


def _prefix(route: Object) -> str:
    """The path of an endpoint, before /v1."""
    return str(route["spec"]["rules"][0]["matches"][0]["path"]["value"]).removesuffix("/v1")


def _own_route(service: str, revision: str) -> str:
    return sibling(service, ROUTES, revision)


def _gateway(service: str) -> str:
    return sibling(service, "gateway.networking.k8s.io/gateways", GATEWAY)


def _groups(service: Object) -> list[str]:
    """The names of the network endpoint groups with the pods of a Service, one for each of its ports.

    https://cloud.google.com/kubernetes-engine/docs/how-to/standalone-neg#neg_status
    """
    text = service["metadata"].get("annotations", {}).get(NEGS)
    return list(json.loads(text).get("network_endpoint_groups", {}).values()) if text else []


def _counted(cloud: Cloud, revision_of: dict[str, str], since: datetime) -> dict[str, Counted]:
    requests = _values(cloud, revision_of, since, REQUESTS, monitoring.SUM, GROUP, STATUS)
    latencies = _values(cloud, revision_of, since, LATENCIES, monitoring.PERCENTILE_95, GROUP)
    return count(
        (
            (revision_of[group], labels["response_code_class"] == SERVER_ERROR, int(value["int64Value"]))
            for group, labels, value in requests
        ),
        ((revision_of[group], float(value["doubleValue"])) for group, _, value in latencies),
    )


def _values(
    cloud: Cloud, groups: Iterable[str], since: datetime, metric: str, reducer: str, *by: str
) -> Iterator[tuple[str, dict[str, str], Any]]:
    """The group of pods, the labels of the metric, and the value of each time series."""
    wanted = ", ".join(f'"{group}"' for group in sorted(groups))
    conditions = [f'metric.type = "{metric}"', 'resource.type = "internal_http_lb_rule"']
    conditions.append(f"resource.labels.backend_name = one_of({wanted})")
    for series, value in monitoring.values(cloud, cloud.settings.project, conditions, since, reducer, *by):
        yield series["resource"]["labels"]["backend_name"], series["metric"].get("labels", {}), value
