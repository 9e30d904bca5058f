"""Checks and defaults of clusters. This GKE has Autopilot clusters only."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from dropforge_local.base.errors import ApiError

from ..kit.names import REGION, ZONE, invalid_label
from .config import GkeConfig

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
# Autopilot manages nodes itself: https://cloud.google.com/kubernetes-engine/docs/resources/autopilot-standard-feature-comparison
NODE_FIELDS = ("node_pools", "node_config", "initial_node_count", "instance_group_urls")
GCLOUD_POOL = "default-pool"  # gcloud sends it with Autopilot clusters too


def check_cluster(cluster: Any, location: str) -> None:
    """Raise INVALID_ARGUMENT for a new cluster that GKE would refuse, UNIMPLEMENTED for a Standard cluster."""
    if not NAME.fullmatch(cluster.name):
        raise _refuse(
            f"cluster.name is {cluster.name!r}; expected lowercase letters, numbers and hyphens, a letter first, "
            "no hyphen last, at most 40 in all"
        )
    if ZONE.fullmatch(location):
        raise _refuse("Autopilot clusters must be regional clusters.")
    check_location(location)
    if not cluster.autopilot.enabled:
        raise ApiError("UNIMPLEMENTED", "Standard clusters are not emulated by the local stack: set autopilot.enabled")
    if [pool.name for pool in cluster.node_pools] == [GCLOUD_POOL]:
        cluster.ClearField("node_pools")
    for field in NODE_FIELDS:
        value = getattr(cluster, field)
        if cluster.HasField(field) if field == "node_config" else value:
            raise _refuse(f"Setting {field} is not allowed on Autopilot clusters.")
    pool = cluster.workload_identity_config.workload_pool
    if pool and not pool.endswith(".svc.id.goog"):
        raise _refuse(f"workload_identity_config.workload_pool is {pool!r}; expected PROJECT.svc.id.goog")
    check_labels(dict(cluster.resource_labels))


def check_location(location: str) -> None:
    if not REGION.fullmatch(location) and not ZONE.fullmatch(location):
        raise _refuse(f"location {location!r} does not exist; expected a region, such as us-central1, or a zone")


def check_labels(labels: dict[str, str]) -> None:
    if wrong := invalid_label(labels):
        raise _refuse(
            f"resource label {wrong[0]!r}: {wrong[1]!r} is not valid; expected at most 63 lowercase letters, numbers, "
            "hyphens and underscores, a letter first in the key"
        )
    if len(labels) > 64:
        raise _refuse(f"there are {len(labels)} resource labels; expected at most 64")


def complete(cluster: Any, name: str, config: GkeConfig, now: str) -> None:
    """Fill in the fields that the server sets."""
    _, project, _, location, _, _ = name.split("/")
    cluster.location = cluster.zone = location
    cluster.id = hashlib.sha256(f"{name}{now}".encode()).hexdigest()
    cluster.self_link = f"https://container.googleapis.com/v1/{name}"
    cluster.create_time = now
    cluster.network = cluster.network or "default"
    cluster.subnetwork = cluster.subnetwork or "default"
    cluster.locations[:] = [f"{location}-{zone}" for zone in "abc"]
    cluster.initial_cluster_version = cluster.initial_cluster_version or config.version
    cluster.current_master_version = cluster.current_node_version = config.version
    cluster.release_channel.channel = cluster.release_channel.channel or 2  # REGULAR
    cluster.workload_identity_config.workload_pool = f"{project}.svc.id.goog"
    cluster.label_fingerprint = fingerprint(dict(cluster.resource_labels))


def fingerprint(labels: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(labels, sort_keys=True).encode()).hexdigest()[:8]


def _refuse(message: str) -> ApiError:
    return ApiError("INVALID_ARGUMENT", message)
