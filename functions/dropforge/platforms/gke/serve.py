"""Serving `gke`: vLLM as a Deployment on a standing Autopilot cluster, behind a load balancer inside the VPC.

With max_instances above min_instances the length of vLLM's queue decides how many instances run:
https://cloud.google.com/kubernetes-engine/docs/how-to/machine-learning/inference/autoscaling
Weights stream from the bucket, by the pod's own identity:
https://cloud.google.com/kubernetes-engine/docs/how-to/workload-identity
"""

from __future__ import annotations

from collections.abc import Iterator

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.settings import Settings
from dropforge.cloud import kubernetes, pods
from dropforge.cloud.classify import something_may_exist
from dropforge.cloud.context import Cloud
from dropforge.cloud.kubernetes import Kubernetes
from dropforge.cloud.listing import Listed
from dropforge.cloud.resource import Resource
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.serving import START_HINT, Deployment, Server
from dropforge.platforms.training import Waits
from dropforge.spec import JobSpec

from .catalog import gke_price
from .gateway import WeightedRoute
from .workload import (
    INSTANCE,
    KINDS,
    cluster_of,
    connect,
    events_of,
    is_ready,
    manifests,
    no_pods,
    own_workload,
    pods_of,
    region_of,
    resources,
    serve_of,
    url_once_ready,
)


class GkeDeployment(Server):
    """See `Server` for the contract of each verb."""

    def region(self, deployment: Deployment) -> str:
        return region_of(deployment.spec)

    def price(self, spec: JobSpec, placement: int | None = None) -> HourlyPrice:
        serve = serve_of(spec)
        if serve.price_usd_per_hour is not None:
            return HourlyPrice(serve.price_usd_per_hour, None, "serve.price_usd_per_hour in the spec")
        return gke_price(serve.accelerator, serve.accelerator_count, region_of(spec), serve.capacity)

    def resources(self, deployment: Deployment) -> list[Resource]:
        return resources(own_workload(deployment))

    def deploy(self, cloud: Cloud, deployment: Deployment) -> str | Waits:
        api = connect(cloud, deployment)
        if api is None:
            return Waits(f"{cluster_of(deployment)} is being created")
        workload = own_workload(deployment)
        first, *others = manifests(workload)
        api.ensure(cluster_of(deployment), first)
        with something_may_exist():
            for manifest in others:
                api.ensure(cluster_of(deployment), manifest)
            return url_once_ready(cloud, api, workload)

    def why_not_ready(self, cloud: Cloud, deployment: Deployment) -> CloudError:
        api = connect(cloud, deployment)
        if api is None:
            return CloudError(
                ErrorClass.CONFIG, f"{cluster_of(deployment)} is still being created", "wait until it runs"
            )
        workload = own_workload(deployment)
        server_pods = pods_of(api, workload)
        if not server_pods:
            return CloudError(ErrorClass.CODE, no_pods(api, workload) or "its Deployment has no pods", START_HINT)
        reasons = []
        for pod in server_pods:
            events = events_of(api, workload, pod["metadata"]["name"])
            if error := pods.unschedulable(pod, events):
                return error
            if not is_ready(pod):
                reasons.append(f"pod {pod['metadata']['name']}: {pods.waits_for(pod, events)}")
        if reasons:
            return CloudError(ErrorClass.CODE, "; ".join(reasons[:3]), START_HINT)
        events = events_of(api, workload, workload.name)
        message = pods.last_event(events, "SyncLoadBalancerFailed") or "its load balancer has no address"
        hint = "look at the events of its Service: `kubectl describe service`"
        return CloudError(ErrorClass.INFRASTRUCTURE, message, hint)

    def exists(self, cloud: Cloud, deployment: Deployment) -> bool:
        return kubernetes.exists(cloud, self.resources(deployment)[0].name)

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        yield from kubernetes.listed(cloud, _listed_in, is_used=bool(cloud.settings.gke_cluster))

    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        is_deployment = kind == "apps.k8s.io/Deployment"
        return kubernetes.delete(cloud, name, of_it=f"{INSTANCE}={name.rsplit('/', 1)[1]}" if is_deployment else "")


def _listed_in(api: Kubernetes, cluster: str, settings: Settings) -> list[Listed]:
    """The resources of runs' endpoints and of named endpoints in one cluster."""
    selector = f"{names.MANAGED_BY}=dropforge,!{names.ATTEMPT_LABEL}"
    region = cluster.split("/")[3]
    kinds = WeightedRoute.kinds if settings.has_gateway(region) else KINDS
    return [
        kubernetes.listed_of(cluster, item)
        for kind in kinds
        for item in api.each(settings.kubernetes_namespace, *kind, selector)
    ]
