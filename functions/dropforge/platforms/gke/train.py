"""Target `gke`: one Kubernetes Job per attempt on GKE Autopilot, in a standing cluster or in one of the attempt's own.

A cluster takes minutes to create and to delete. Each call looks once, and continues when the cluster is there.
dropforge makes the retries: the Job has one try. The attempt's end is read from the Job, its pods and their events.
API: https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1/projects.locations.clusters
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.settings import Settings
from dropforge.cloud import kubernetes
from dropforge.cloud.classify import classify, classify_create, classify_text, client_errors, status_of
from dropforge.cloud.clients import TIMEOUT_SECONDS
from dropforge.cloud.context import Cloud
from dropforge.cloud.disks import delete_disk, list_disks
from dropforge.cloud.kubernetes import CLUSTER, Object
from dropforge.cloud.listing import Listed, Unlisted, list_places
from dropforge.cloud.resource import Resource, check_owner
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.training import Launch, Phase, Status, Target, Waits
from dropforge.spec import JobSpec

from .catalog import GKE_CLUSTER_PRICE, gke_price
from .requests import cluster_of, cluster_request, gke_target, namespace_manifests, requests
from .status import status_of_job

JOB = "batch.k8s.io/Job"
JOB_NAME = "batch.kubernetes.io/job-name"  # the label that a Job gives to its pods


class GkeJobs(Target):
    """See `Target` for the contract of each verb."""

    def regions(self, spec: JobSpec) -> list[str]:
        return [placement.region for placement in spec.target.placements]

    def price(self, spec: JobSpec, placement: int) -> HourlyPrice:
        target = gke_target(spec)
        if target.price_usd_per_hour is not None:
            price = HourlyPrice(target.price_usd_per_hour, None, "target.price_usd_per_hour in the spec")
        else:
            where = target.placements[placement]
            gpus = target.accelerator_count * target.nodes
            price = gke_price(target.accelerator, gpus, where.region, where.capacity)
        if target.cluster.create and price.usd_per_hour is not None:
            return replace(price, usd_per_hour=round(price.usd_per_hour + GKE_CLUSTER_PRICE.usd_per_hour, 4))
        return price

    def resources(self, launch: Launch) -> list[Resource]:
        return requests(launch)

    def provision(self, cloud: Cloud, launch: Launch) -> Waits | None:
        if gke_target(launch.spec).cluster.create:
            cluster = self._own_cluster(cloud, launch)
        else:
            cluster = kubernetes.standing_cluster(cloud, cluster_of(launch), "target.cluster.name")
        if cluster is None:
            return Waits(f"{cluster_of(launch)} is being created")
        api = kubernetes.connect(cloud, cluster)
        if gke_target(launch.spec).cluster.create:
            for manifest in namespace_manifests(launch):
                api.create(manifest)
        for resource in requests(launch):
            if resource.kind != CLUSTER:
                api.ensure(cluster_of(launch), resource.request)
        return None

    def inspect(self, cloud: Cloud, launch: Launch) -> Status:
        from google.cloud.container_v1 import Cluster

        cluster = kubernetes.find_cluster(cloud, cluster_of(launch))
        if cluster is None or cluster.status == Cluster.Status.STOPPING:
            return Status(
                Phase.GONE, f"{cluster_of(launch)} {'does not exist' if cluster is None else 'is being deleted'}"
            )
        job = requests(launch)[-1]
        api = kubernetes.connect(cloud, cluster)
        manifest = api.get(job.name)
        if manifest is None:
            return Status(Phase.GONE, f"{job.name} does not exist")
        namespace = launch.settings.kubernetes_namespace
        pods = api.find(namespace, "pods", labelSelector=_pods_of(job.name))

        def events_of(uid: str) -> list[Object]:
            return api.find(namespace, "events", fieldSelector=f"involvedObject.uid={uid}")

        return status_of_job(manifest, pods, gke_target(launch.spec).nodes, events_of)

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        """The clusters of attempts, and the resources in them and in the standing clusters."""
        is_used = bool(cloud.settings.gke_cluster)
        yield from list_places(cloud, [cloud], _clusters, is_used=is_used)
        yield from kubernetes.listed(cloud, _listed_in, is_used=is_used)

    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        if kind == CLUSTER:
            return self._delete_cluster(cloud, name)
        return kubernetes.delete(cloud, name, _pods_of(name) if kind == JOB else "")

    def _own_cluster(self, cloud: Cloud, launch: Launch) -> Any:
        """The attempt's own cluster once it runs, created if it does not exist; None while it is being created."""
        from google.cloud.container_v1 import Cluster

        name = cluster_of(launch)
        cluster = kubernetes.find_cluster(cloud, name)
        if cluster is None:
            self._create_cluster(cloud, launch)
            return None
        check_owner(name, cluster.resource_labels, launch.run)
        if cluster.status in (Cluster.Status.RUNNING, Cluster.Status.RECONCILING):
            return cluster
        if cluster.status == Cluster.Status.PROVISIONING:
            return None
        message = f"{name} is {cluster.status.name}: {kubernetes.conditions_of(cluster)}"
        error = classify_text("FAILED_PRECONDITION", message)
        if not error.error_class.moves_on:
            error = CloudError(ErrorClass.INFRASTRUCTURE, message, "the next attempt creates another cluster")
        raise error

    def _create_cluster(self, cloud: Cloud, launch: Launch) -> None:
        from google.api_core.exceptions import Conflict
        from google.cloud.container_v1 import Cluster

        request = cluster_request(launch)
        cluster = Cluster.from_json(json.dumps(request["cluster"]), ignore_unknown_fields=False)
        try:
            cloud.clients.gke().create_cluster(parent=request["parent"], cluster=cluster, timeout=TIMEOUT_SECONDS)
        except Conflict:
            return  # an earlier create whose reply was lost; the next call checks the owner
        except client_errors() as error:
            raise classify_create(error) from error

    def _delete_cluster(self, cloud: Cloud, name: str) -> bool:
        """Start to delete a cluster, which takes minutes; True once neither it nor its disks exist."""
        from google.cloud.container_v1 import Cluster

        cluster = kubernetes.find_cluster(cloud, name)
        if cluster is None:
            return _delete_disks(cloud, name)
        if cluster.status == Cluster.Status.STOPPING:
            return False
        try:
            cloud.clients.gke().delete_cluster(name=name, timeout=TIMEOUT_SECONDS)
        except client_errors() as error:
            # The cluster may not exist any more, or another operation runs: a cluster has one at a time.
            if status_of(error) not in ("NOT_FOUND", "FAILED_PRECONDITION"):
                raise classify(error) from error
        return False


def _delete_disks(cloud: Cloud, cluster: str) -> bool:
    """Delete the disks of an attempt's deleted cluster, which GKE leaves behind; True once there is none."""
    origin = names.training_of(cluster.rpartition("/")[2])
    listed = list_places(cloud, [cloud], list_disks)
    try:
        left = [disk.name for disk in listed if (disk.run, disk.attempt) == origin]
    except Unlisted as error:  # a disk may be in the zone that is not listed
        raise error.problems[0] from error
    gone = [delete_disk(cloud, name) for name in left]
    return all(gone)


def _clusters(cloud: Cloud) -> Iterator[Listed]:
    """The clusters that belong to an attempt, in every state."""
    for cluster in kubernetes.clusters(cloud).clusters:
        if kubernetes.is_of_attempt(cluster):
            name = kubernetes.cluster_name(cloud.settings.project, cluster.location, cluster.name)
            created = datetime.fromisoformat(cluster.create_time)
            yield Listed(CLUSTER, name, dict(cluster.resource_labels), created)


def _listed_in(api: kubernetes.Kubernetes, cluster: str, settings: Settings) -> Iterator[Listed]:
    """The Jobs, the Services, the NetworkPolicies, and the pods without a Job in one cluster."""
    namespace = settings.kubernetes_namespace
    pods = list(api.each(namespace, "v1", "Pod", kubernetes.OF_ATTEMPTS))
    jobs = list(api.each(namespace, "batch/v1", "Job", kubernetes.OF_ATTEMPTS))
    services = list(api.each(namespace, "v1", "Service", kubernetes.OF_ATTEMPTS))
    policies = list(api.each(namespace, "networking.k8s.io/v1", "NetworkPolicy", kubernetes.OF_ATTEMPTS))
    for item in [*jobs, *services, *policies, *kubernetes.orphans(pods, "Job", jobs)]:
        yield kubernetes.listed_of(cluster, item)


def _pods_of(job: str) -> str:
    return f"{JOB_NAME}={job.rpartition('/')[2]}"
