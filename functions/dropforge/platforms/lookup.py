"""Where a stage finds a platform: by the type in a spec, or by the kind of a resource."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from . import SERVERS, TARGETS, get_server, get_target
from .serving import Server
from .training import Target



# The platform that deletes a resource, by the resource's kind.
_OWNERS: dict[str, Callable[[], Target | Server]] = {
    "run.googleapis.com/Job": lambda: get_target("cloud_run"),
    "container.googleapis.com/Cluster": lambda: get_target("gke"),
    "batch.k8s.io/Job": lambda: get_target("gke"),
    "k8s.io/Service": lambda: get_target("gke"),
    "k8s.io/Pod": lambda: get_target("gke"),
    "ray.io/RayJob": lambda: get_target("ray"),
    "ray.io/RayCluster": lambda: get_target("ray"),
    "tpu.googleapis.com/QueuedResource": lambda: get_target("tpu_vm"),
    "tpu.googleapis.com/Node": lambda: get_target("tpu_vm"),
    "compute.googleapis.com/Disk": lambda: get_target("tpu_vm"),
    "run.googleapis.com/Service": lambda: get_server("cloud_run"),
    "apps.k8s.io/Deployment": lambda: get_server("gke"),
    "autoscaling.k8s.io/HorizontalPodAutoscaler": lambda: get_server("gke"),
    "monitoring.googleapis.com/PodMonitoring": lambda: get_server("gke"),
}


def owner_of(kind: str) -> Target | Server:
    """The platform that deletes resources of a kind. Raises KeyError."""
    return _OWNERS[kind]()


def all_platforms() -> list[Target | Server]:
    """Every target and every server: together they list all resources of a deployment."""
    return [*map(get_target, TARGETS), *map(get_server, SERVERS)]


@dataclass(frozen=True)
class Platforms:
    """The platforms of a context. A simulation hands in its own."""

    target: Callable[[str], Target] = get_target
    server: Callable[[str], Server] = get_server
    owner: Callable[[str], Target | Server] = owner_of
    all: Callable[[], Iterable[Target | Server]] = all_platforms
