"""RayClusters: a head, its services and token, and the hosts of worker groups; ended pods are replaced."""

from __future__ import annotations

import base64
import copy
import secrets
from typing import Any

from ..admission import GPU, TPU
from ..controllers.loop import Key
from ..controllers.owned import (
    OwnerController,
    Tools,
    condition_status,
    is_finished,
    is_ready,
    make_pod,
    owned,
    owner_reference,
    set_condition,
)
from ..kinds import POD, RAY_CLUSTER, SECRET, SERVICE, Kind
from ..objects import DeleteOptions
from ..ports import Ports
from ..quantities import parse_quantity, whole
from ..rayrules import cluster_problem
from ..store import Object
from . import pods

COMPONENT = "raycluster-controller"


class RayClusterController(OwnerController):
    """Reconciles a cluster's RayClusters."""

    kind = RAY_CLUSTER

    def __init__(self, tools: Tools, ports: Ports) -> None:
        super().__init__(tools)
        self._ports = ports
        self._builder = pods.Builder(tools.config.ray_operator, tools.config.ray_probe_seconds)

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
        """Create the services of the head and of the hosts, and the token that every request to Ray must carry."""
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
        """Replace ended pods and create missing pods; return why a pod could not be created, or ""."""
        present = owned(self._tools.store, POD, cluster)
        ended = [pod for pod in present if is_finished(pod)]
        self._delete(cluster, ended)
        present = [pod for pod in present if pod not in ended]
        failure = ""
        if _head_of(present) is None:
            failure = self._make(cluster, *self._builder.head(cluster))
        for group in cluster["spec"].get("workerGroupSpecs", ()):
            failure = self._fill_group(cluster, group, present) or failure
        return failure

    def _fill_group(self, cluster: Object, group: Object, present: list[Object]) -> str:
        """Create lost hosts. From 1.6 on, a replica has all of its hosts or none: when a host is lost, delete the
        others too."""
        wanted = 0 if group.get("suspend") else _replicas(group)
        of_group = [pod for pod in present if pod["metadata"]["labels"][pods.GROUP] == group["groupName"]]
        failure = ""
        hosts = range(group["numOfHosts"])
        for replica in range(wanted):
            members = [pod for pod in of_group if pod["metadata"]["labels"][pods.REPLICA] == str(replica)]
            present_hosts = {pod["metadata"]["labels"][pods.HOST] for pod in members}
            lost = [host for host in hosts if str(host) not in present_hosts]
            if not members or not self._tools.config.ray_operator.replaces_slices:
                for host in lost:
                    failure = self._make(cluster, *self._builder.worker(cluster, group, replica, host)) or failure
            elif lost or any("deletionTimestamp" in pod["metadata"] for pod in members):
                self._delete(cluster, members)
        surplus = [pod for pod in of_group if int(pod["metadata"]["labels"][pods.REPLICA]) >= wanted]
        self._delete(cluster, surplus)
        return failure

    def _make(self, cluster: Object, template: Object, metadata: Object) -> str:
        pod = make_pod(self._tools, RAY_CLUSTER, cluster, template, metadata)
        if pod is None:
            return f"failed to create a {metadata['labels'][pods.NODE_TYPE]} pod; events say why"
        if metadata["labels"][pods.NODE_TYPE] == pods.HEAD:
            # Workers learn the head's ports before the head has started.
            among = self._tools.config.pod_ports
            for port in (pods.GCS, pods.AGENT):
                self._ports.take(self._tools.store.cluster, pod["metadata"]["uid"], port, among)
        return ""

    def _delete(self, cluster: Object, surplus: list[Object]) -> None:
        for pod in surplus:
            metadata = pod["metadata"]
            if "deletionTimestamp" in metadata:
                continue
            self._tools.objects.delete_item(POD, pod, DeleteOptions("Background"))
            self._tell(cluster, "Normal", "DeletedPod", f"Deleted pod {metadata['namespace']}/{metadata['name']}")

    def _write(self, cluster: Object, failure: str) -> None:
        members = owned(self._tools.store, POD, cluster)
        status = copy.deepcopy(cluster.get("status", {}))
        before = status.get("state")
        workers = [pod for pod in members if pod["metadata"]["labels"][pods.NODE_TYPE] == pods.WORKER]
        desired = desired_workers(cluster)
        status |= {
            "desiredWorkerReplicas": desired,
            "readyWorkerReplicas": sum(map(is_ready, workers)),
            "availableWorkerReplicas": sum(pod["status"].get("phase") == "Running" for pod in workers),
            "observedGeneration": cluster["metadata"]["generation"],
            "head": self._head(cluster, members),
            "endpoints": {"gcs-server": str(pods.GCS), "dashboard": str(pods.DASHBOARD)},
            **desired_resources(cluster),
        }
        everything = len(members) == desired + 1 and all(map(is_ready, members))
        if cluster["spec"].get("suspend"):
            status["state"] = "suspended" if not members else before or ""
        elif everything and not failure:
            status["state"] = "ready"
        self._set_conditions(status, cluster, members, failure, everything=everything)
        if status.get("state") != before:
            status.setdefault("stateTransitionTimes", {})[status["state"]] = self._tools.stamp()
        status = {key: value for key, value in status.items() if value not in ("", {})}
        if status != {key: value for key, value in cluster.get("status", {}).items() if key != "lastUpdateTime"}:
            status["lastUpdateTime"] = self._tools.stamp()
            self._tools.store.replace(RAY_CLUSTER, {**cluster, "status": status})

    def _head(self, cluster: Object, members: list[Object]) -> Object:
        head = _head_of(members)
        name = pods.head_service_name(cluster["metadata"]["name"])
        return {"serviceName": name, **({"podName": head["metadata"]["name"]} if head else {})}

    def _set_conditions(
        self, status: Object, cluster: Object, members: list[Object], failure: str, *, everything: bool
    ) -> None:
        now = self._tools.stamp()
        head = _head_of(members)
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
        suspended = "True" if cluster["spec"].get("suspend") and not members else "False"
        set_condition(status, "RayClusterSuspended", suspended, "RayClusterSuspended", "", now)
        status["conditions"] = [entry for entry in status["conditions"] if entry["type"] != "ReplicaFailure" or failure]
        if failure:
            set_condition(status, "ReplicaFailure", "True", "FailedCreatePod", failure, now)

    def _tell(self, cluster: Object, event_type: str, reason: str, message: str) -> None:
        self._tools.recorder.record(RAY_CLUSTER, cluster, event_type, reason, message, COMPONENT)


def desired_workers(cluster: Object) -> int:
    groups = cluster["spec"].get("workerGroupSpecs", ())
    return sum(_replicas(group) * group["numOfHosts"] for group in groups if not group.get("suspend"))


def desired_resources(cluster: Object) -> dict[str, str]:
    """The sums of all pods' requests."""
    spec = cluster["spec"]
    groups = [(1, spec["headGroupSpec"])]
    groups += [(_replicas(group) * group["numOfHosts"], group) for group in spec.get("workerGroupSpecs", ())]
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


def _replicas(group: Object) -> int:
    return max(int(group["replicas"]), int(group["minReplicas"]))


def _head_of(members: list[Object]) -> Object | None:
    return next((pod for pod in members if pod["metadata"]["labels"][pods.NODE_TYPE] == pods.HEAD), None)
