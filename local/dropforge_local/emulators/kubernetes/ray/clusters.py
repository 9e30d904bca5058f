"""RayClusters: a head, its services and token, and the worker groups' hosts, replaced when they end."""

from __future__ import annotations

import base64
import copy
import secrets
from collections.abc import Iterator
from typing import Any

from ..admission import GPU, TPU
from ..controllers.loop import Key
from ..controllers.owned import (
    Tools,
    all_keys,
    condition_status,
    is_finished,
    is_ready,
    make_pod,
    own_keys,
    owned,
    owner_reference,
    set_condition,
)
from ..kinds import POD, RAY_CLUSTER, SECRET, SERVICE, Kind
from ..objects import DeleteOptions
from ..ports import Ports
from ..quantities import parse_quantity, whole
from ..store import Change, Object
from . import pods
from .rules import cluster_problem

COMPONENT = "raycluster-controller"


class RayClusterController:
    """Reconciles one cluster's RayClusters."""

    def __init__(self, tools: Tools, ports: Ports) -> None:
        self._tools = tools
        self._ports = ports

    def keys(self, change: Change) -> Iterator[Key]:
        return own_keys(RAY_CLUSTER, change)

    def all_keys(self) -> list[Key]:
        return all_keys(self._tools.store, RAY_CLUSTER)

    def reconcile(self, key: Key) -> float | None:
        cluster = self._tools.store.find(RAY_CLUSTER, *key)
        if cluster is None or "deletionTimestamp" in cluster["metadata"]:
            return None
        if problem := cluster_problem(cluster["spec"]):
            self._tell(cluster, "Warning", "InvalidRayClusterSpec", problem)
            return None
        failure = ""
        if cluster["spec"].get("suspend"):
            self._delete(cluster, owned(self._tools.store, POD, cluster))
        else:
            self._ensure_parts(cluster)
            failure = self._fill(cluster)
        self._write(cluster, failure)
        return self._tools.now() + self._tools.config.ray_poll_seconds if failure else None

    def _ensure_parts(self, cluster: Object) -> None:
        """Services of the head and of the hosts, and the token that every request to Ray has to bear."""
        metadata = cluster["metadata"]
        name = metadata["name"]
        labels = {pods.CLUSTER: name, "app.kubernetes.io/created-by": "kuberay-operator"}
        numbers = {
            "gcs-server": pods.GCS, "dashboard": pods.DASHBOARD, "client": pods.CLIENT, "metrics": pods.METRICS
        }  # fmt: skip
        ports = [{"name": key, "port": port, "targetPort": port} for key, port in numbers.items()]
        head = {"selector": {pods.CLUSTER: name, pods.NODE_TYPE: pods.HEAD}, "ports": ports}
        self._ensure(SERVICE, cluster, pods.head_service_name(name), labels, spec=head)
        if any(group["numOfHosts"] > 1 for group in cluster["spec"].get("workerGroupSpecs", ())):
            hosts = {
                "selector": {pods.CLUSTER: name, pods.NODE_TYPE: pods.WORKER},
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
            }
            self._ensure(SERVICE, cluster, pods.headless_service_name(name), labels, spec=hosts)
        if pods.has_token(cluster) and not cluster["spec"].get("authOptions", {}).get("secretName"):
            token = base64.b64encode(secrets.token_hex(16).encode()).decode()
            self._ensure(SECRET, cluster, name, labels, type="Opaque", data={pods.TOKEN_KEY: token})

    def _ensure(self, kind: Kind, cluster: Object, name: str, labels: dict[str, str], **content: Any) -> None:
        namespace = cluster["metadata"]["namespace"]
        if self._tools.store.find(kind, namespace, name) is not None:
            return
        metadata = {
            "name": name,
            "namespace": namespace,
            "labels": labels,
            "ownerReferences": [owner_reference(RAY_CLUSTER, cluster)],
        }
        manifest = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **content}
        self._tools.objects.create(kind, namespace, manifest)

    def _fill(self, cluster: Object) -> str:
        """Replace pods that have ended, make those that are missing; why one could not be made."""
        there = owned(self._tools.store, POD, cluster)
        over = [pod for pod in there if is_finished(pod)]
        self._delete(cluster, over)
        there = [pod for pod in there if pod not in over]
        failure = ""
        heads = [pod for pod in there if pod["metadata"]["labels"][pods.NODE_TYPE] == pods.HEAD]
        if not heads:
            failure = self._make(cluster, *pods.head_pod(cluster, self._tools.config.ray_probe_seconds))
        for group in cluster["spec"].get("workerGroupSpecs", ()):
            failure = self._fill_group(cluster, group, there) or failure
        return failure

    def _fill_group(self, cluster: Object, group: Object, there: list[Object]) -> str:
        """Each replica has all of its hosts or none: when one is lost, the others go with it."""
        wanted = 0 if group.get("suspend") else max(group["replicas"], group["minReplicas"])
        of_group = [pod for pod in there if pod["metadata"]["labels"][pods.GROUP] == group["groupName"]]
        failure = ""
        hosts = group["numOfHosts"]
        for replica in range(wanted):
            members = [pod for pod in of_group if pod["metadata"]["labels"][pods.REPLICA] == str(replica)]
            if not members:
                for host in range(hosts):
                    made = pods.worker_pod(cluster, group, replica, host, self._tools.config.ray_probe_seconds)
                    failure = self._make(cluster, *made) or failure
            elif len(members) < hosts or any("deletionTimestamp" in pod["metadata"] for pod in members):
                self._delete(cluster, members)
        surplus = [pod for pod in of_group if int(pod["metadata"]["labels"][pods.REPLICA]) >= wanted]
        self._delete(cluster, surplus)
        return failure

    def _make(self, cluster: Object, template: Object, metadata: Object) -> str:
        pod = make_pod(self._tools, RAY_CLUSTER, cluster, template, metadata)
        if pod is None:
            return f"failed to create a {metadata['labels'][pods.NODE_TYPE]} pod; events say why"
        if metadata["labels"][pods.NODE_TYPE] == pods.HEAD:
            # Workers are told of the head's ports before the head has started.
            among = self._tools.config.pod_ports
            for port in (pods.GCS, pods.AGENT):
                self._ports.take(self._tools.store.cluster, pod["metadata"]["uid"], port, among)
        return ""

    def _delete(self, cluster: Object, found: list[Object]) -> None:
        for pod in found:
            if "deletionTimestamp" in pod["metadata"]:
                continue
            metadata = pod["metadata"]
            self._tools.objects.delete(POD, metadata["namespace"], metadata["name"], DeleteOptions("Background"))
            self._tell(cluster, "Normal", "DeletedPod", f"Deleted pod {metadata['namespace']}/{metadata['name']}")

    def _write(self, cluster: Object, failure: str) -> None:
        found = owned(self._tools.store, POD, cluster)
        status = copy.deepcopy(cluster.get("status", {}))
        before = status.get("state")
        workers = [pod for pod in found if pod["metadata"]["labels"][pods.NODE_TYPE] == pods.WORKER]
        desired = desired_workers(cluster)
        status |= {
            "desiredWorkerReplicas": desired,
            "readyWorkerReplicas": sum(map(is_ready, workers)),
            "availableWorkerReplicas": sum(pod["status"].get("phase") == "Running" for pod in workers),
            "observedGeneration": cluster["metadata"]["generation"],
            "head": self._head(cluster, found),
            "endpoints": {"gcs-server": str(pods.GCS), "dashboard": str(pods.DASHBOARD)},
            **desired_resources(cluster),
        }
        everything = len(found) == desired + 1 and all(map(is_ready, found))
        if cluster["spec"].get("suspend"):
            status["state"] = "suspended" if not found else before or ""
        elif everything and not failure:
            status["state"] = "ready"
        self._set_conditions(status, cluster, found, failure, everything=everything)
        if status.get("state") != before:
            status.setdefault("stateTransitionTimes", {})[status["state"]] = self._tools.stamp()
        status = {key: value for key, value in status.items() if value not in ("", {})}
        if status != {key: value for key, value in cluster.get("status", {}).items() if key != "lastUpdateTime"}:
            status["lastUpdateTime"] = self._tools.stamp()
            self._tools.store.replace(RAY_CLUSTER, {**cluster, "status": status})

    def _head(self, cluster: Object, found: list[Object]) -> Object:
        head = next((pod for pod in found if pod["metadata"]["labels"][pods.NODE_TYPE] == pods.HEAD), None)
        name = pods.head_service_name(cluster["metadata"]["name"])
        return {"serviceName": name, **({"podName": head["metadata"]["name"]} if head else {})}

    def _set_conditions(
        self, status: Object, cluster: Object, found: list[Object], failure: str, *, everything: bool
    ) -> None:
        now = self._tools.stamp()
        head = next((pod for pod in found if pod["metadata"]["labels"][pods.NODE_TYPE] == pods.HEAD), None)
        ready = "True" if head and is_ready(head) else "False"
        reason = (
            "HeadPodRunningAndReady" if ready == "True" else "HeadPodNotFound" if head is None else "HeadPodNotReady"
        )
        set_condition(status, "HeadPodReady", ready, reason, "", now)
        provisioned = condition_status({"status": status}, "RayClusterProvisioned") == "True"
        if everything and not provisioned:
            text = "All Ray Pods are ready for the first time"
            set_condition(status, "RayClusterProvisioned", "True", "AllPodRunningAndReadyFirstTime", text, now)
        elif not provisioned:
            text = "RayCluster Pods are being provisioned for first time"
            set_condition(status, "RayClusterProvisioned", "False", "RayClusterPodsProvisioning", text, now)
        suspended = "True" if cluster["spec"].get("suspend") and not found else "False"
        set_condition(status, "RayClusterSuspended", suspended, "RayClusterSuspended", "", now)
        status["conditions"] = [one for one in status["conditions"] if one["type"] != "ReplicaFailure" or failure]
        if failure:
            set_condition(status, "ReplicaFailure", "True", "FailedCreatePod", failure, now)

    def _tell(self, cluster: Object, event_type: str, reason: str, message: str) -> None:
        self._tools.recorder.record(RAY_CLUSTER, cluster, event_type, reason, message, COMPONENT)


def desired_workers(cluster: Object) -> int:
    groups = cluster["spec"].get("workerGroupSpecs", ())
    return sum(max(one["replicas"], one["minReplicas"]) * one["numOfHosts"] for one in groups if not one.get("suspend"))


def desired_resources(cluster: Object) -> dict[str, str]:
    """What all pods together ask for."""
    spec = cluster["spec"]
    groups = [(1, spec["headGroupSpec"])]
    groups += [
        (max(one["replicas"], one["minReplicas"]) * one["numOfHosts"], one) for one in spec.get("workerGroupSpecs", ())
    ]
    names = {"desiredCPU": "cpu", "desiredMemory": "memory", "desiredGPU": GPU, "desiredTPU": TPU}
    totals = {}
    for field, resource in names.items():
        total = parse_quantity("0")
        for count, group in groups:
            for container in group["template"]["spec"]["containers"]:
                given = container.get("resources", {})
                amount = given.get("limits", {}).get(resource) or given.get("requests", {}).get(resource, "0")
                total += count * parse_quantity(amount)
        totals[field] = str(whole(str(float(total)))) if total.denominator != 1 else str(total)
    return totals
