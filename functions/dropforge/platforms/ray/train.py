"""Target `ray`: one RayJob per attempt, on GKE with the Ray operator, in a standing cluster or the attempt's own.

The RayJob makes a Ray cluster and ends it; a Ray cluster that is left over is found by the RayJob's name and deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.settings import Settings
from dropforge.cloud import kubernetes, pods
from dropforge.cloud.context import Cloud
from dropforge.cloud.kubernetes import CLUSTER, Object
from dropforge.cloud.listing import Listed
from dropforge.cloud.resource import Resource
from dropforge.platforms.gke.catalog import GKE_CLUSTER_PRICE
from dropforge.platforms.gke.requests import cluster_of, namespace_manifests
from dropforge.platforms.gke.spec import GkePlacement
from dropforge.platforms.gke.train import GkeJobs
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.tpus import tpu_price
from dropforge.platforms.training import Launch, Phase, Status, Waits
from dropforge.spec import JobSpec

from .catalog import GKE_TPUS
from .requests import ray_target, requests, storage_class_manifest
from .spec import RayTarget
from .status import status_of_ray_job

GROUP = "ray.io"
RAY_CLUSTER = "ray.io/RayCluster"
ORIGIN = "ray.io/originated-from-cr-name"  # the label that a RayJob gives to its cluster
OF_CLUSTER = "ray.io/cluster"  # the labels that a cluster gives to its pods
NODE_TYPE = "ray.io/node-type"
CLAIMS = "persistentvolumeclaims"
_MEMORY_HINT = "raise target.head_memory_gib: the head holds the model twice, in 32 bits"


class RayJobs(GkeJobs):
    """See `Target` for the contract of each verb. It creates and deletes clusters as target `gke` does."""

    def price(self, spec: JobSpec, placement: int) -> HourlyPrice:
        target = ray_target(spec)
        if target.price_usd_per_hour is None:
            return _unknown_price(target, target.placements[placement])
        price = HourlyPrice(target.price_usd_per_hour, None, "target.price_usd_per_hour in the spec")
        if target.cluster.create:
            return replace(price, usd_per_hour=round(target.price_usd_per_hour + GKE_CLUSTER_PRICE.usd_per_hour, 4))
        return price

    def resources(self, launch: Launch) -> list[Resource]:
        return requests(launch)

    def provision(self, cloud: Cloud, launch: Launch) -> Waits | None:
        own = ray_target(launch.spec).cluster.create
        name = cluster_of(launch)
        cluster = (
            self._own_cluster(cloud, launch) if own else kubernetes.standing_cluster(cloud, name, "target.cluster.name")
        )
        if cluster is None:
            return Waits(f"{name} is being created")
        _check_operator(cluster, name)
        api = kubernetes.connect(cloud, cluster)
        for manifest in [*namespace_manifests(launch), storage_class_manifest(launch)] if own else ():
            api.create(manifest)
        for resource in requests(launch):
            if resource.kind != CLUSTER:
                api.ensure(name, resource.request)
        return None

    def inspect(self, cloud: Cloud, launch: Launch) -> Status:
        from google.cloud.container_v1 import Cluster

        cluster = kubernetes.find_cluster(cloud, cluster_of(launch))
        if cluster is None or cluster.status == Cluster.Status.STOPPING:
            return Status(Phase.GONE, f"{cluster_of(launch)} does not exist, or is being deleted")
        job = requests(launch)[-1]
        api = kubernetes.connect(cloud, cluster)
        manifest = api.get(job.name)
        if manifest is None:
            return Status(Phase.GONE, f"{job.name} does not exist")
        status = status_of_ray_job(manifest)
        if status.phase not in (Phase.PENDING, Phase.RUNNING):
            return status
        namespace = launch.settings.kubernetes_namespace
        cluster_pods = _pods_of_cluster(api, namespace, manifest)
        status = _problem(api, namespace, cluster_pods) or _with_reason(status, cluster_pods)
        # The price counts the hosts, which may be paid for while they wait for the head.
        hosts = [pod for pod in cluster_pods if pod["metadata"]["labels"].get(NODE_TYPE) == "worker"]
        is_paid = status.phase is Phase.PENDING and any(pod["spec"].get("nodeName") for pod in hosts)
        return replace(status, is_paid=is_paid)

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        """The RayJobs and what remains of deleted ones. Target `gke` lists the clusters of attempts."""
        yield from kubernetes.listed(cloud, _listed_in, is_used=bool(cloud.settings.gke_cluster))

    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        if kind == CLUSTER:
            return super().teardown(cloud, kind, name)
        if kind == RAY_CLUSTER:
            return kubernetes.delete(cloud, name, f"{OF_CLUSTER}={name.rpartition('/')[2]}")
        if not (kubernetes.delete(cloud, name) and self._delete_clusters(cloud, name)):
            return False
        of_attempt = _of_attempt(name)
        # Pods that a user has orphaned, and the claims of the heads' disks, which are deleted after their pods.
        return kubernetes.delete(cloud, name, of_attempt) and kubernetes.delete(cloud, name, of_attempt, CLAIMS)

    def _delete_clusters(self, cloud: Cloud, job: str) -> bool:
        """Delete the Ray clusters that remain of a RayJob; True once there is none."""
        parent, _, path = job.partition("/k8s/namespaces/")
        namespace, name = path.partition("/")[0], path.rpartition("/")[2]
        cluster = kubernetes.find_cluster(cloud, parent)
        if cluster is None or not kubernetes.has_endpoint(cluster):
            return True
        api = kubernetes.connect(cloud, cluster)
        remaining = api.find(namespace, "rayclusters", GROUP, labelSelector=f"{ORIGIN}={name}")
        prefix = f"{parent}/k8s/namespaces/{namespace}/{GROUP}/rayclusters"
        ray_clusters = [ray_cluster["metadata"]["name"] for ray_cluster in remaining]
        gone = [kubernetes.delete(cloud, f"{prefix}/{short}", f"{OF_CLUSTER}={short}") for short in ray_clusters]
        return all(gone)


def _of_attempt(job: str) -> str:
    """The selector of all pods and claims of a RayJob's attempt; "" if the job's name is not an attempt's."""
    origin = names.training_of(job.rpartition("/")[2])
    return f"{names.RUN_LABEL}={origin[0]},{names.ATTEMPT_LABEL}={origin[1]}" if origin else ""


def _check_operator(cluster: Any, name: str) -> None:
    """Raise CloudError unless the cluster has the Ray operator: without the add-on nothing runs a RayJob."""
    if not cluster.addons_config.ray_operator_config.enabled:
        raise CloudError(
            ErrorClass.CONFIG,
            f"{name} has no Ray operator, which target ray needs",
            f"gcloud container clusters update {name.rpartition('/')[2]} --update-addons=RayOperator=ENABLED",
        )


def _listed_in(api: kubernetes.Kubernetes, cluster: str, settings: Settings) -> Iterator[Listed]:
    """The RayJobs, the Ray clusters without a RayJob, and the pods without a Ray cluster in one cluster."""
    namespace = settings.kubernetes_namespace
    pods = list(api.each(namespace, "v1", "Pod", kubernetes.OF_ATTEMPTS))
    clusters = list(api.each(namespace, "ray.io/v1", "RayCluster", ORIGIN))
    jobs = list(api.each(namespace, "ray.io/v1", "RayJob", kubernetes.OF_ATTEMPTS))
    live = {job["metadata"]["name"] for job in jobs}
    orphaned = [ray_cluster for ray_cluster in clusters if ray_cluster["metadata"]["labels"][ORIGIN] not in live]
    for item in [*jobs, *kubernetes.orphans(pods, "RayCluster", clusters)]:
        yield kubernetes.listed_of(cluster, item)
    for item in orphaned:
        # The name of the RayJob tells the owner, because not every version of the operator copies the labels.
        if origin := names.training_of(item["metadata"]["labels"][ORIGIN]):
            run, attempt = origin
            owner = {names.ATTEMPT_LABEL: str(attempt), names.DEPLOYMENT_LABEL: settings.deployment}
            listed = kubernetes.listed_of(cluster, item)
            yield listed._replace(labels=names.labels(run, owner | listed.labels))


def _pods_of_cluster(api: kubernetes.Kubernetes, namespace: str, job: Object) -> list[Object]:
    """The pods of a RayJob's Ray cluster; none before the RayJob has a cluster."""
    cluster = (job.get("status") or {}).get("rayClusterName")
    return api.find(namespace, "pods", labelSelector=f"{OF_CLUSTER}={cluster}") if cluster else []


def _problem(api: kubernetes.Kubernetes, namespace: str, cluster_pods: list[Object]) -> Status | None:
    """A problem that the pods of a RayJob's cluster show and the RayJob does not; None if there is none."""
    for pod in cluster_pods:
        if problem := _problem_of_pending(api, namespace, pod) or _problem_of_head(pod):
            return problem
    return None


def _with_reason(status: Status, cluster_pods: list[Object]) -> Status:
    """The status of a RayJob that waits, with what the first of its pods on a node does before its container runs."""
    starting = next(
        (p for p in cluster_pods if p["spec"].get("nodeName") and p["status"].get("phase") == "Pending"), None
    )
    if status.phase is not Phase.PENDING or starting is None:
        return status
    return replace(status, message=f"{status.message}; {pods.starts(starting)}")


def _problem_of_pending(api: kubernetes.Kubernetes, namespace: str, pod: Object) -> Status | None:
    if pod["status"].get("phase") != "Pending":
        return None
    events = api.find(namespace, "events", fieldSelector=f"involvedObject.uid={pod['metadata']['uid']}")
    error = pods.broken(pod, events) or pods.unschedulable(pod, events)
    if error is None:
        return None
    phase = Phase.FAILED if error.error_class is ErrorClass.CONFIG else Phase.PENDING
    return Status(phase, error.message, error.error_class, hint=error.hint)


def _problem_of_head(pod: Object) -> Status | None:
    """Why the head ended. Ray restarts a crashed head and submits its job again, endlessly if the job crashes it."""
    if pod["metadata"]["labels"].get(NODE_TYPE) != "head" or pod["status"].get("phase") == "Pending":
        return None
    error = pods.broken(pod, [])
    if error is None:
        return None
    is_memory = error.error_class is ErrorClass.OUT_OF_MEMORY
    return Status(Phase.FAILED, error.message, error.error_class, hint=_MEMORY_HINT if is_memory else error.hint)


def _unknown_price(target: RayTarget, placement: GkePlacement) -> HourlyPrice:
    """Why the price is unknown: the catalog has none of the head and its disk. The price of the slice helps."""
    field, chips = "target.price_usd_per_hour", target.slice.hosts * target.slice.chips
    price = tpu_price(GKE_TPUS[target.accelerator].generation, chips, placement.region, placement.capacity, field)
    if price.usd_per_hour is None:
        return price
    where = f"{target.accelerator} {target.topology} in {placement.region}"
    known = f"{where} costs {price.usd_per_hour:g} USD per hour ({price.source}, {price.as_of})"
    return HourlyPrice(
        None, None, f"no price for the head and its disk in the catalog; {known}: set {field} to the sum"
    )
