"""Where Cloud Logging has the output of a run's containers. It stays there after the containers are deleted.

`dropforge logs` reads it by the same filter.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from dropforge.base.log import explorer
from dropforge.run.record import LedgerEntry

_OWNERS_OF_PODS = frozenset({"apps.k8s.io/Deployment", "batch.k8s.io/Job"})
# A TPU VM's node writes logs; its queued resource and its disk do not.
_SILENT = frozenset({"compute.googleapis.com/Disk", "tpu.googleapis.com/QueuedResource"})


def filter_of(entries: Iterable[LedgerEntry]) -> str:
    """Return the log filter for the containers of resources; "" if no resource has containers."""
    return " OR ".join(text for entry in entries if (text := _filter(entry.kind, entry.name)))


def page_of(project: str, entries: Iterable[LedgerEntry], since: datetime) -> str:
    """Return the address of the Logs Explorer with the output of resources; "" if no resource has containers."""
    wanted = filter_of(entries)
    return explorer(project, f"({wanted})", since) if wanted else ""


def _filter(kind: str, name: str) -> str:
    """Return the log filter for a resource's containers; "" for a resource without containers.

    An unknown kind is filtered by its name in any field.

    https://cloud.google.com/run/docs/logging, https://cloud.google.com/logging/docs/api/v2/resource-list
    """
    short = name.rpartition("/")[2]
    if kind in _SILENT:
        return ""
    if kind == "tpu.googleapis.com/Node":
        zone = name.split("/")[3]
        return f'(resource.type="tpu_worker" AND resource.labels.zone="{zone}" AND resource.labels.node_id="{short}")'
    if kind in _OWNERS_OF_PODS:
        _, _, _, location, _, cluster, _, _, namespace, *_ = name.split("/")
        labels = {"location": location, "cluster_name": cluster, "namespace_name": namespace}
        equal = " AND ".join(f'resource.labels.{label}="{value}"' for label, value in labels.items())
        return f'(resource.type="k8s_container" AND {equal} AND resource.labels.pod_name=~"^{short}-")'
    if "/clusters/" in name:
        return ""
    if kind == "run.googleapis.com/Job":
        return f'(resource.type="cloud_run_job" AND resource.labels.job_name="{short}")'
    if kind == "run.googleapis.com/Service":
        return f'(resource.type="cloud_run_revision" AND resource.labels.service_name="{short}")'
    return f'"{short}"'
