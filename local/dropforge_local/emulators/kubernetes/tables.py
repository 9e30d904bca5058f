"""Renders objects as clients accept them: as tables, which `kubectl get` prints, or as their metadata alone.

https://kubernetes.io/docs/reference/using-api/api-concepts/#receiving-resources-as-tables
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .kinds import Kind
from .refusals import Refusal
from .times import seconds

Object = Mapping[str, Any]
TABLE = "Table"
METADATA, METADATA_LIST = "PartialObjectMetadata", "PartialObjectMetadataList"
META = {"g": ("meta.k8s.io",), "v": ("v1", "v1beta1")}
JSON_RANGES = ("*/*", "application/*", "application/json")
Cells = Callable[[Object, float], list[Any]]


def accepted(header: str) -> str:
    """The first form of an Accept header that this server has: TABLE, METADATA, or "" for the object itself.

    Refuses with 406 if it has none of them.
    """
    for given in (header or "*/*").split(","):
        media, *parameters = [part.strip() for part in given.split(";")]
        values = dict(part.partition("=")[::2] for part in parameters)
        form = values.get("as", "").removesuffix("List") if values.get("as") == METADATA_LIST else values.get("as", "")
        known = form in (TABLE, METADATA) and all(values.get(name) in choices for name, choices in META.items())
        if media in JSON_RANGES and (known or not form):
            return form
    raise Refusal(406, "only the following media types are accepted: application/json")


def render_metadata(item: Object) -> dict[str, Any]:
    return {"kind": METADATA, "apiVersion": "meta.k8s.io/v1", "metadata": item["metadata"]}


def render_metadata_list(items: Sequence[Object], metadata: Object) -> dict[str, Any]:
    rendered = [render_metadata(item) for item in items]
    return {"kind": METADATA_LIST, "apiVersion": "meta.k8s.io/v1", "metadata": dict(metadata), "items": rendered}


def render_table(kind: Kind, items: Sequence[Object], now: float, metadata: Object) -> dict[str, Any]:
    """A Table with a row per object; each row carries the object's metadata."""
    headers, cells = COLUMNS.get(kind.key, DEFAULT)
    columns = [
        {
            "name": header.lstrip("-"),
            "type": "string",
            "format": "name" if header == "Name" else "",
            "description": "",
            "priority": 1 if header.startswith("-") else 0,
        }
        for header in headers.split(",")
    ]
    rows = [
        {
            "cells": cells(item, now),
            "object": render_metadata(item),
        }
        for item in items
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": dict(metadata),
        "columnDefinitions": columns,
        "rows": rows,
    }


def age(since: str | None, now: float) -> str:
    return duration(now - seconds(since)) if since else "<unknown>"


def duration(passed: float) -> str:
    """A duration as kubectl writes it: 45s, 3m20s, 25m, 4h10m, 2d3h, 40d."""
    whole = max(0, int(passed))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 120:
        return f"{whole}s"
    if minutes < 10:
        return f"{minutes}m{whole % 60}s" if whole % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    return f"{days}d{hours % 24}h" if days < 8 and hours % 24 else f"{days}d"


def pod_status(pod: Object) -> str:
    """The STATUS column: a container's reason if it says more than the phase."""
    status = pod.get("status", {})
    text = status.get("reason") or status.get("phase", "Unknown")
    for container in reversed(status.get("containerStatuses", ())):
        state = container.get("state", {})
        if reason := state.get("waiting", {}).get("reason") or state.get("terminated", {}).get("reason"):
            text = reason
    for container in status.get("initContainerStatuses", ()):
        state = container.get("state", {})
        reason = state.get("waiting", {}).get("reason") or state.get("terminated", {}).get("reason")
        if reason and reason != "Completed" and status.get("phase") == "Pending":
            text = f"Init:{reason}"
    return "Terminating" if "deletionTimestamp" in pod["metadata"] else text


def _name(item: Object) -> str:
    return str(item["metadata"]["name"])


def _age(item: Object, now: float) -> str:
    return age(item["metadata"].get("creationTimestamp"), now)


def _pod(pod: Object, now: float) -> list[Any]:
    statuses = pod.get("status", {}).get("containerStatuses", [])
    ready = sum(1 for container in statuses if container.get("ready"))
    restarts = sum(container.get("restartCount", 0) for container in statuses)
    where = [pod.get("status", {}).get("podIP") or "<none>", pod["spec"].get("nodeName") or "<none>"]
    return [_name(pod), f"{ready}/{len(pod['spec']['containers'])}", pod_status(pod), restarts, _age(pod, now), *where]


def _job(job: Object, now: float) -> list[Any]:
    status = job.get("status", {})
    ended = {entry["type"]: entry for entry in status.get("conditions", ()) if entry["status"] == "True"}
    state = next((name for name in ("Complete", "Failed", "Suspended") if name in ended), "Running")
    if "deletionTimestamp" in job["metadata"] and state == "Running":
        state = "Terminating"
    finish = status.get("completionTime") or ended.get("Failed", {}).get("lastTransitionTime")
    took = ""
    if started := status.get("startTime"):
        took = duration((seconds(finish) if finish else now) - seconds(started))
    wanted = job["spec"].get("completions")
    done = f"{status.get('succeeded', 0)}/{wanted}" if wanted is not None else f"{status.get('succeeded', 0)}/1"
    return [_name(job), state, done, took, _age(job, now)]


def _deployment(item: Object, now: float) -> list[Any]:
    status = item.get("status", {})
    ready = f"{status.get('readyReplicas', 0)}/{item['spec']['replicas']}"
    return [_name(item), ready, status.get("updatedReplicas", 0), status.get("availableReplicas", 0), _age(item, now)]


def _replica_set(item: Object, now: float) -> list[Any]:
    status = item.get("status", {})
    counts = [item["spec"]["replicas"], status.get("replicas", 0), status.get("readyReplicas", 0)]
    return [_name(item), *counts, _age(item, now)]


def _service(item: Object, now: float) -> list[Any]:
    spec = item["spec"]
    ports = ",".join(f"{port['port']}/{port['protocol']}" for port in spec.get("ports", ())) or "<none>"
    ingress = item.get("status", {}).get("loadBalancer", {}).get("ingress", [])
    external = ",".join(address.get("ip", "") for address in ingress) or "<none>"
    return [_name(item), spec["type"], spec.get("clusterIP", "<none>"), external, ports, _age(item, now)]


def _claim(item: Object, now: float) -> list[Any]:
    spec, status = item["spec"], item.get("status", {})
    state = "Terminating" if "deletionTimestamp" in item["metadata"] else status.get("phase", "Pending")
    size = status.get("capacity", {}).get("storage", "")
    volume, storage_class = spec.get("volumeName", ""), spec.get("storageClassName", "")
    modes = ",".join(_SHORT_MODES[mode] for mode in spec["accessModes"])
    return [_name(item), state, volume, size, modes, storage_class, _age(item, now)]


def _volume(item: Object, now: float) -> list[Any]:
    spec, claim = item["spec"], item["spec"].get("claimRef", {})
    modes = ",".join(_SHORT_MODES[mode] for mode in spec["accessModes"])
    owner = f"{claim.get('namespace')}/{claim.get('name')}"
    status = item.get("status", {}).get("phase", "")
    about = [modes, spec["persistentVolumeReclaimPolicy"], status, owner, spec.get("storageClassName", "")]
    return [_name(item), spec["capacity"]["storage"], *about, _age(item, now)]


def _storage_class(item: Object, now: float) -> list[Any]:
    return [_name(item), item["provisioner"], item["reclaimPolicy"], item["volumeBindingMode"], _age(item, now)]


def _event(item: Object, now: float) -> list[Any]:
    about = item["involvedObject"]
    seen = age(item.get("lastTimestamp") or item["metadata"].get("creationTimestamp"), now)
    target = f"{about.get('kind', '').lower()}/{about.get('name', '')}"
    return [seen, item.get("type", ""), item.get("reason", ""), target, item.get("message", "")]


def _node(item: Object, now: float) -> list[Any]:
    version = item.get("status", {}).get("nodeInfo", {}).get("kubeletVersion", "")
    return [_name(item), "Ready", "<none>", _age(item, now), version]


def _autoscaler(item: Object, now: float) -> list[Any]:
    spec = item["spec"]
    target = f"{spec['scaleTargetRef']['kind']}/{spec['scaleTargetRef']['name']}"
    return [_name(item), target, spec["minReplicas"], spec["maxReplicas"], _age(item, now)]


_SHORT_MODES = {"ReadOnlyMany": "ROX", "ReadWriteMany": "RWX", "ReadWriteOnce": "RWO", "ReadWriteOncePod": "RWOP"}
DEFAULT: tuple[str, Cells] = ("Name,Age", lambda item, now: [_name(item), _age(item, now)])
COLUMNS: Mapping[str, tuple[str, Cells]] = {
    "pods": ("Name,Ready,Status,Restarts,Age,-IP,-Node", _pod),
    "jobs.batch": ("Name,Status,Completions,Duration,Age", _job),
    "deployments.apps": ("Name,Ready,Up-to-date,Available,Age", _deployment),
    "replicasets.apps": ("Name,Desired,Current,Ready,Age", _replica_set),
    "services": ("Name,Type,Cluster-IP,External-IP,Port(s),Age", _service),
    "persistentvolumeclaims": ("Name,Status,Volume,Capacity,Access Modes,StorageClass,Age", _claim),
    "persistentvolumes": (
        "Name,Capacity,Access Modes,Reclaim Policy,Status,Claim,StorageClass,Age",
        _volume,
    ),
    "storageclasses.storage.k8s.io": ("Name,Provisioner,ReclaimPolicy,VolumeBindingMode,Age", _storage_class),
    "events": ("Last Seen,Type,Reason,Object,Message", _event),
    "nodes": ("Name,Status,Roles,Age,Version", _node),
    "namespaces": ("Name,Status,Age", lambda item, now: [_name(item), item["status"]["phase"], _age(item, now)]),
    "configmaps": ("Name,Data,Age", lambda item, now: [_name(item), len(item.get("data", {})), _age(item, now)]),
    "secrets": (
        "Name,Type,Data,Age",
        lambda item, now: [_name(item), item["type"], len(item.get("data", {})), _age(item, now)],
    ),
    "serviceaccounts": (
        "Name,Secrets,Age",
        lambda item, now: [_name(item), len(item.get("secrets", ())), _age(item, now)],
    ),
    "horizontalpodautoscalers.autoscaling": ("Name,Reference,MinPods,MaxPods,Age", _autoscaler),
}
