"""GKE behind the client of container_v1: Autopilot clusters, each with its own Kubernetes API.

The standing clusters exist from the start, as Terraform creates them. The history records when a run's own cluster
begins and ceases to exist; its fee is paid from RUNNING on. A cluster has one operation at a
time: https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1/projects.locations.clusters
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from google.api_core.exceptions import AlreadyExists, FailedPrecondition, Forbidden, NotFound
from google.cloud import container_v1

from .kubernetes import Api
from .trainer import Container
from .workloads import Workloads
from .world import PROJECT, World

CLUSTER = "container.googleapis.com/Cluster"
STANDING = "dropforge"
# Seconds that GKE takes, slowly and usually.
CREATION_SECONDS, DELETION_SECONDS = ((600, 1500), (200, 400)), ((300, 600), (60, 200))
OWNERS = frozenset({"provision", "inspect"})  # the functions that may use a run's own cluster (terraform/)
ACCOUNTS = ("dropforge-trainer", "dropforge-server")  # of the namespace of a standing cluster


@dataclass
class Cluster:
    """A cluster; `error` says why it could not be created."""

    name: str
    labels: dict[str, str]
    has_ray: bool
    created: float
    host: str
    api: Api
    workloads: Workloads
    status: str = "PROVISIONING"
    error: tuple[str, str] = ("", "")  # of container_v1.StatusCondition: code and message


class Gke:
    """The service and its client. `launched` is called for each training container that starts."""

    def __init__(self, world: World, regions: tuple[str, ...]) -> None:
        self.world = world
        self.clusters: dict[str, Cluster] = {}
        self.launched: Callable[[Container], None] = lambda _: None
        self._apis: dict[str, Api] = {}  # by host; the API of a deleted cluster does not answer
        self._nothing = Api(world, "", has_ray=False)
        self._nothing.is_open = False
        for region in regions:
            self._stand(f"projects/{PROJECT}/locations/{region}/clusters/{STANDING}")

    def clients(self) -> dict[str, Callable[..., Any]]:
        return {"gke": lambda: self, "kubernetes": lambda host, authority: self._apis.get(host, self._nothing)}

    def living(self) -> list[str]:
        own = [name for name, cluster in self.clusters.items() if cluster.labels]
        return sorted([*own, *(name for cluster in self.clusters.values() for name in cluster.api.objects)])

    def answers(self, url: str) -> bool:
        return any(cluster.workloads.answers(url) for cluster in self.clusters.values())

    def get_cluster(self, name: str, timeout: float) -> Any:
        return self.world.effect("gke.get_cluster", lambda: _shown(self._find(name)))

    def list_clusters(self, parent: str, timeout: float) -> Any:
        def read() -> Any:
            clusters = [_shown(self.clusters[name]) for name in sorted(self.clusters)]
            return SimpleNamespace(clusters=clusters, missing_zones=[])

        # Seeds without clusters draw no random number for GKE.
        return self.world.effect("gke.list_clusters", read) if self.clusters else read()

    def create_cluster(self, parent: str, cluster: Any, timeout: float) -> None:
        name = f"{parent}/clusters/{cluster.name}"
        self.world.effect(f"gke.create {cluster.name}", lambda: self._create(name, cluster), changes=True)

    def delete_cluster(self, name: str, timeout: float) -> None:
        self.world.effect("gke.delete", lambda: self._delete(name), changes=True)

    def _create(self, name: str, wanted: Any) -> None:
        world = self.world
        assert wanted.autopilot.enabled, "no other cluster is simulated"
        assert wanted.control_plane_endpoints_config.dns_endpoint_config.allow_external_traffic, "the way in"
        if name in self.clusters:
            raise AlreadyExists(f"Already exists: {name}.")
        if world.happens(world.faults.quota * 0.5):
            raise Forbidden('Insufficient regional quota to satisfy request: resource "GKE_CLUSTERS".')
        has_ray = wanted.addons_config.ray_operator_config.enabled
        made = self._add(name, dict(wanted.resource_labels), has_ray)
        world.fact("created", type=CLUSTER, name=name, labels=made.labels)
        full = world.lasts(f"no GKE in {name.split('/')[3]}", world.faults.stockout * 0.3)
        wait = world.duration(world.faults.slow_start, *CREATION_SECONDS)
        world.after(wait, lambda: self._fail(made) if full else self._run(made))
        self._perhaps_by_hand(made)

    def _run(self, cluster: Cluster) -> None:
        cluster.status = "RUNNING"
        self.world.fact("made", name=cluster.name)
        self.world.fact("running", name=cluster.name)

    def _fail(self, cluster: Cluster) -> None:
        cluster.status = "ERROR"
        where = cluster.name.split("/")[3]
        cluster.error = "GCE_STOCKOUT", f"ZONE_RESOURCE_POOL_EXHAUSTED in {where}: does not have enough resources"
        self.world.fact("made", name=cluster.name)

    def _delete(self, name: str) -> None:
        cluster = self._find(name)
        if cluster.status in ("PROVISIONING", "STOPPING"):
            raise FailedPrecondition("Cluster is running incompatible operation operation-1.")
        self._begin_end(cluster)

    def _begin_end(self, cluster: Cluster) -> None:
        cluster.status = "STOPPING"
        cluster.api.is_ending = True
        world = self.world
        for name in [cluster.name, *cluster.api.objects]:
            world.deleting(name=name)
        wait = world.duration(world.faults.slow_end, *DELETION_SECONDS)
        world.after(wait / 2, cluster.api.close)
        world.after(wait, lambda: self._end(cluster))

    def _end(self, cluster: Cluster) -> None:
        del self.clusters[cluster.name]
        self.world.fact("ended", name=cluster.name, exit_code=None)
        self.world.fact("gone", name=cluster.name)

    def _perhaps_by_hand(self, cluster: Cluster) -> None:
        """Maybe a user deletes the cluster in the console."""
        world = self.world
        if not world.happens(world.faults.deleted * 0.5):
            return

        def delete() -> None:
            is_there = self.clusters.get(cluster.name) is cluster and cluster.status in ("RUNNING", "ERROR")
            if is_there and world.now < world.calm:
                for name in [cluster.name, *cluster.api.objects]:
                    world.fact("fault", what="deleted", resource=name)
                self._begin_end(cluster)

        world.after(world.random.uniform(200, 2400), delete)

    def _stand(self, name: str) -> None:
        cluster = self._add(name, {}, has_ray=True)
        cluster.status = "RUNNING"
        cluster.api.accounts["dropforge"] = set(ACCOUNTS)

    def _add(self, name: str, labels: dict[str, str], has_ray: bool) -> Cluster:
        world, host = self.world, f"gke-{len(self._apis)}.chaos"
        api = Api(world, name, has_ray, OWNERS if labels else None)
        workloads = Workloads(world, api, lambda container: self.launched(container))
        made = Cluster(name, labels, has_ray, world.now, host, api, workloads)
        self.clusters[name] = made
        self._apis[f"https://{host}"] = api
        return made

    def _find(self, name: str) -> Cluster:
        if name not in self.clusters:
            raise NotFound(f"Not found: {name}.")
        return self.clusters[name]


def _shown(cluster: Cluster) -> Any:
    code, message = cluster.error
    runs = cluster.status in ("RUNNING", "STOPPING")
    dns = SimpleNamespace(endpoint=cluster.host if runs else "", allow_external_traffic=runs)
    _, _, _, location, _, name = cluster.name.split("/")
    return SimpleNamespace(
        name=name,
        location=location,
        status=container_v1.Cluster.Status[cluster.status],
        status_message=message,
        conditions=[SimpleNamespace(code=SimpleNamespace(name=code), message=message)] * bool(code),
        resource_labels=cluster.labels,
        create_time=datetime.fromtimestamp(cluster.created, UTC).isoformat(timespec="seconds"),
        endpoint="",
        master_auth=SimpleNamespace(cluster_ca_certificate=""),
        control_plane_endpoints_config=SimpleNamespace(dns_endpoint_config=dns),
        addons_config=SimpleNamespace(ray_operator_config=SimpleNamespace(enabled=cluster.has_ray)),
    )
