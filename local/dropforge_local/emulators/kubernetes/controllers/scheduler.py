"""The scheduler and Autopilot's autoscaler: they bind pods to nodes and keep nodes as long as pods need them.

A node is virtual: a name with labels and a number of GPUs or TPU chips. A shortage (stock, quota, a missing
reservation) shows as in a real cluster: the pod stays Pending, with a condition and events that state the reason.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..admission import ACCELERATOR, GPU, TPU, TPU_ACCELERATOR, TPU_TOPOLOGY, devices
from ..config import Accelerator
from ..discovery import VERSION
from ..faults import Faults
from ..kinds import CLAIM, NODE, POD
from ..objects import random_suffix
from ..quantities import parse_quantity
from ..store import Change, Object
from ..times import timestamp
from .loop import Key
from .owned import Tools, all_keys, controller_of, is_finished, set_condition
from .volumes import SELECTED_NODE, claim_of, ephemeral_volumes

READY_AT = "local.dropforge/ready-at"
PREEMPTED = "local.dropforge/preempted"
RESERVATION = "cloud.google.com/reservation-name"
# Labels that selectors can request of Autopilot's nodes; a selector for another label never matches a node.
KNOWN_LABELS = {
    ACCELERATOR,
    TPU_ACCELERATOR,
    TPU_TOPOLOGY,
    "cloud.google.com/gke-accelerator-count",
    "cloud.google.com/gke-gpu-driver-version",
    "cloud.google.com/gke-spot",
    "cloud.google.com/gke-provisioning",
    "cloud.google.com/gke-flex-start",
    "cloud.google.com/gke-max-run-duration-seconds",
    "cloud.google.com/compute-class",
    "cloud.google.com/machine-family",
    "cloud.google.com/reservation-affinity",
    "cloud.google.com/reservation-project",
    RESERVATION,
    "kubernetes.io/arch",
    "kubernetes.io/os",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
}
BASE_LABELS = {"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}
LARGEST = {"cpu": 222, "memory": 1024 * 2**30}  # the largest requests of an Autopilot pod
PODS_PER_NODE = 32
NO_MATCH = "node(s) didn't match Pod's node affinity/selector"


@dataclass(frozen=True)
class Obstacle:
    """Why a pod has no node: `why` for the scheduler's event, `scale_up` for the autoscaler's event, if it tried."""

    why: str
    scale_up: str = ""


class Scheduler:
    """Binds pods and adds nodes. Its keys are pods."""

    def __init__(self, tools: Tools, faults: Faults) -> None:
        self._tools = tools
        self._faults = faults
        self._waits_for: dict[
            str, str
        ] = {}  # pod uid -> the node it waits for; lost at a restart, which only costs time

    def is_claimed(self, node: str) -> bool:
        """Whether a pod waits for the node."""
        return node in self._waits_for.values()

    def keys(self, change: Change) -> Iterator[Key]:
        if change.kind == POD and change.body and _is_pending(change.body):
            yield change.namespace, change.name
        if change.kind == CLAIM and (owner := controller_of(change.item)):
            yield change.namespace, owner["name"]
        if (change.kind == POD and (change.body is None or is_finished(change.body))) or change.kind == NODE:
            yield from self.all_keys()  # the change may have freed a node

    def all_keys(self) -> list[Key]:
        pods = [pod for pod in self._tools.store.items(POD) if _is_pending(pod)]
        return [(pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in pods]

    def reconcile(self, key: Key) -> float | None:
        pod = self._tools.store.find(POD, *key)
        if pod is None or not _is_pending(pod):
            return None
        self._waits_for.pop(pod["metadata"]["uid"], None)
        obstacle = self._impossible(pod)
        node = None if obstacle else self._find_node(pod)
        if node is None and (obstacle := obstacle or self._shortage(pod)):
            self._give_up(pod, obstacle)
            return None
        node = node or self._add_node(pod)
        ready_at = float(node["metadata"]["annotations"][READY_AT])
        if ready_at > self._tools.now():
            self._waits_for[pod["metadata"]["uid"]] = node["metadata"]["name"]
            self._mark_waiting(pod)
            return ready_at
        if self._has_disks(pod, node):
            self._bind(pod, node)
        else:
            self._waits_for[pod["metadata"]["uid"]] = node["metadata"]["name"]
        return None

    def _has_disks(self, pod: Object, node: Object) -> bool:
        """Whether the claims of the pod's ephemeral volumes are bound. If not, select the node for them: the change of
        a claim makes this pod's key dirty again."""
        bound = []
        for name, _ in ephemeral_volumes(pod):
            claim = claim_of(self._tools.store, pod, name)
            bound.append(claim is not None and claim["status"]["phase"] == "Bound")
            if claim is None and self._tools.store.find(CLAIM, pod["metadata"]["namespace"], name):
                why = f'PVC "{name}" was not created for pod "{pod["metadata"]["name"]}" (pod is not owner)'
                self._give_up(pod, Obstacle(why))
            elif claim is not None:
                claim["metadata"].setdefault("annotations", {})[SELECTED_NODE] = node["metadata"]["name"]
                self._tools.store.replace(CLAIM, claim)
        return all(bound)

    def _find_node(self, pod: Object) -> Object | None:
        """A node with the pod's labels and enough free devices; ready nodes come first."""
        selector, (resource, wanted) = pod["spec"].get("nodeSelector", {}), _wanted(pod["spec"])
        fitting = []
        for node in self._tools.store.items(NODE):
            labels, capacity = node["metadata"]["labels"], _capacity(node, resource)
            if not wanted and _capacity(node, TPU):
                continue
            used, pods = self._used(node, resource)
            matches = not node["spec"].get("unschedulable") and all(
                labels.get(key) == value for key, value in selector.items()
            )
            if matches and bool(capacity) is bool(wanted) and used + wanted <= capacity and pods < PODS_PER_NODE:
                fitting.append(node)
        return min(fitting, key=lambda node: float(node["metadata"]["annotations"][READY_AT]), default=None)

    def _used(self, node: Object, resource: str) -> tuple[int, int]:
        """(devices of a kind, pods) in use on a node, including the pods that wait for it."""
        name = node["metadata"]["name"]
        there = [
            pod for pod in self._tools.store.items(POD) if pod["spec"].get("nodeName") == name and not is_finished(pod)
        ]
        return sum(devices(pod["spec"], resource) for pod in there), len(there)

    def _impossible(self, pod: Object) -> Obstacle | None:
        """Why no node, old or new, can ever run a pod; None if a node could."""
        spec = pod["spec"]
        selector, (resource, wanted) = spec.get("nodeSelector", {}), _wanted(spec)
        count, prefix = self._count()
        if set(selector) - KNOWN_LABELS or any(selector.get(key, value) != value for key, value in BASE_LABELS.items()):
            return Obstacle(f"{prefix}{count} {NO_MATCH}.")
        for name, largest in LARGEST.items():
            requests = [container.get("resources", {}).get("requests", {}) for container in spec["containers"]]
            requested = sum(parse_quantity(request.get(name, 0)) for request in requests)
            if requested > largest:
                return Obstacle(f"{prefix}{count} Insufficient {name}.")
        if foreign := _foreign_resources(spec):
            return Obstacle(f"{prefix}{count} Insufficient {foreign[0]}.")
        label, name = _accelerator(selector)
        if not wanted and not label:
            return None
        kind = self._kind(label, name)
        if kind is None or (label == TPU_ACCELERATOR) is not (resource == TPU) or wanted > kind.per_node:
            return Obstacle(f"{prefix}{count} {NO_MATCH if label and kind is None else f'Insufficient {resource}'}.")
        return None

    def _count(self) -> tuple[int, str]:
        """The number of nodes, and how the scheduler begins its messages about them."""
        count = len(self._tools.store.items(NODE))
        return count, f"0/{count} nodes are available: "

    def _kind(self, label: str, name: str) -> Accelerator | None:
        known = self._tools.config.tpus if label == TPU_ACCELERATOR else self._tools.config.accelerators
        return known.get(name)

    def _shortage(self, pod: Object) -> Obstacle | None:
        """Why no node can be added for a pod now; None if a node can be added."""
        selector = pod["spec"].get("nodeSelector", {})
        label, accelerator = _accelerator(selector)
        kind = self._kind(label, accelerator)
        if kind is None:
            return None
        resource, wanted = _wanted(pod["spec"])
        count, prefix = self._count()
        why = f"{prefix}{count} Insufficient {resource}."
        size = _machine_size(resource, wanted, kind.per_node)
        reservations = self._tools.config.reservations
        reservation = selector.get(RESERVATION)
        if reservation and reservations is not None and reservation not in reservations:
            return Obstacle(why, f"GCE reservation {reservation!r} not found")
        if self._faults.is_stocked_out(accelerator):
            return Obstacle(why, "GCE out of resources")
        used = sum(
            _capacity(node, resource)
            for node in self._tools.store.items(NODE)
            if node["metadata"]["labels"].get(label) == accelerator
        )
        quota = self._faults.quota(accelerator)
        if quota is not None and used + size > quota:
            return Obstacle(why, "GCE quota exceeded")
        if used + size > kind.total:
            return Obstacle(why, "GCE out of resources")
        return None

    def _give_up(self, pod: Object, obstacle: Obstacle) -> None:
        self._set_unscheduled(pod, obstacle.why)
        self._tell(pod, "Warning", "FailedScheduling", obstacle.why, "default-scheduler")
        if obstacle.scale_up:
            location = self._tools.store.cluster.split("/")[3]
            text = (
                f"Node scale up in zones {location}-a, {location}-b associated with this pod failed: "
                f"{obstacle.scale_up}. Pod is at risk of not being scheduled."
            )
            self._tell(pod, "Warning", "FailedScaleUp", text, "cluster-autoscaler")
        else:
            text = f"pod didn't trigger scale-up: 1 {NO_MATCH}"
            self._tell(pod, "Normal", "NotTriggerScaleUp", text, "cluster-autoscaler")

    def _mark_waiting(self, pod: Object) -> None:
        resource, wanted = _wanted(pod["spec"])
        shortage = f"Insufficient {resource}" if wanted else NO_MATCH
        self._set_unscheduled(pod, f"{self._count()[1]}{shortage}.")

    def _set_unscheduled(self, pod: Object, message: str) -> None:
        set_condition(
            pod["status"], "PodScheduled", "False", "Unschedulable", message, self._tools.stamp(), lastProbeTime=None
        )
        pod["metadata"]["resourceVersion"] = self._tools.store.replace(POD, pod)["metadata"]["resourceVersion"]

    def _add_node(self, pod: Object) -> Object:
        selector = pod["spec"].get("nodeSelector", {})
        kind = self._kind(*_accelerator(selector))
        resource, wanted = _wanted(pod["spec"])
        amounts = {resource: str(_machine_size(resource, max(1, wanted), kind.per_node))} if kind else {}
        node = _make_node({**BASE_LABELS, **selector}, amounts, self._tools.now(), self._tools.config.node_seconds)
        node = self._tools.store.insert(NODE, node)
        name = node["metadata"]["name"]
        text = f"Pod triggered scale-up: [{{{name} 0->1 (max: 1000)}}]"
        self._tell(pod, "Normal", "TriggeredScaleUp", text, "cluster-autoscaler")
        return node

    def _bind(self, pod: Object, node: Object) -> None:
        name = node["metadata"]["name"]
        pod["spec"]["nodeName"] = name
        set_condition(pod["status"], "PodScheduled", "True", "", "", self._tools.stamp(), lastProbeTime=None)
        self._tools.store.replace(POD, pod)
        metadata = pod["metadata"]
        text = f"Successfully assigned {metadata['namespace']}/{metadata['name']} to {name}"
        self._tell(pod, "Normal", "Scheduled", text, "default-scheduler")

    def _tell(self, pod: Object, event_type: str, reason: str, message: str, component: str) -> None:
        self._tools.recorder.record(POD, pod, event_type, reason, message, component)


class NodeController:
    """Makes nodes ready and removes empty nodes. Its keys are nodes."""

    def __init__(self, tools: Tools, is_claimed: Callable[[str], bool]) -> None:
        self._tools = tools
        self._is_claimed = is_claimed
        self._empty_since: dict[str, float] = {}

    def keys(self, change: Change) -> Iterator[Key]:
        if change.kind == NODE:
            yield "", change.name
        elif change.kind == POD and (name := change.item["spec"].get("nodeName")):
            yield "", name

    def all_keys(self) -> list[Key]:
        return all_keys(self._tools.store, NODE)

    def reconcile(self, key: Key) -> float | None:
        node = self._tools.store.find(NODE, *key)
        name = key[1]
        if node is None:
            self._empty_since.pop(name, None)
            return None
        ready_at = float(node["metadata"]["annotations"][READY_AT])
        if ready_at > self._tools.now():
            return ready_at
        set_condition(
            node["status"], "Ready", "True", "KubeletReady", "kubelet is posting ready status", self._tools.stamp()
        )
        node = self._tools.store.replace(NODE, node)
        there = [pod for pod in self._tools.store.items(POD) if pod["spec"].get("nodeName") == name]
        if self._is_claimed(name) or any(not is_finished(pod) for pod in there):
            self._empty_since.pop(name, None)
            return None
        if PREEMPTED in node["metadata"]["annotations"]:
            self._tools.store.remove(NODE, node)
            return None
        since = self._empty_since.setdefault(name, self._tools.now())
        due = since + self._tools.config.node_idle_seconds
        if due > self._tools.now():
            return due
        self._tools.store.remove(NODE, node)
        return None


def _is_pending(pod: Object) -> bool:
    unbound = not pod["spec"].get("nodeName") and pod["status"]["phase"] == "Pending"
    return unbound and "deletionTimestamp" not in pod["metadata"]


def _wanted(spec: Object) -> tuple[str, int]:
    """The devices that a pod requests: (resource, number) of TPU chips, or else of GPUs."""
    chips = devices(spec, TPU)
    return (TPU, chips) if chips else (GPU, devices(spec, GPU))


def _accelerator(selector: dict[str, str]) -> tuple[str, str]:
    """(label, type) of the accelerator that a selector names; two empty strings if it names none."""
    return next(((label, selector[label]) for label in (TPU_ACCELERATOR, ACCELERATOR) if label in selector), ("", ""))


def _capacity(node: Object, resource: str) -> int:
    return int(node["status"]["allocatable"].get(resource, 0))


def _machine_size(resource: str, wanted: int, per_node: int) -> int:
    """Devices of the smallest machine for a pod: 1, 2, 4, 8 or 16 GPUs; all chips of a TPU host."""
    if resource == TPU:
        return wanted
    return min(per_node, next(size for size in (1, 2, 4, 8, 16, wanted) if size >= wanted))


def _foreign_resources(spec: Object) -> list[str]:
    return [
        name
        for container in spec["containers"]
        for name in container.get("resources", {}).get("limits", {})
        if name not in ("cpu", "memory", "ephemeral-storage", GPU, TPU)
    ]


def _make_node(labels: dict[str, str], devices: dict[str, str], now: float, delay: float) -> Object:
    kind = (_accelerator(labels)[1] or "pool").removeprefix("nvidia-")
    name = f"gk3-{kind}-{uuid.uuid4().hex[:8]}-{random_suffix()[:4]}"
    amounts = {"cpu": "222", "memory": "1Ti", "pods": str(PODS_PER_NODE), "ephemeral-storage": "1Ti", **devices}
    stamp = timestamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": stamp,
            "labels": {**labels, "kubernetes.io/hostname": name},
            "annotations": {READY_AT: f"{now + delay:.3f}"},
        },
        "spec": {"providerID": f"gce://local/{name}"},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": name}],
            "conditions": [
                {
                    "type": "Ready",
                    "status": "False" if delay else "True",
                    "reason": "KubeletNotReady" if delay else "KubeletReady",
                    "lastTransitionTime": stamp,
                    "lastHeartbeatTime": stamp,
                }
            ],
            "nodeInfo": {
                "kubeletVersion": VERSION["gitVersion"], "kubeProxyVersion": "", "architecture": "amd64",
                "operatingSystem": "linux", "osImage": "local", "kernelVersion": "", "containerRuntimeVersion": "local",
                "machineID": "", "systemUUID": "", "bootID": "",
            },
        },
    }  # fmt: skip
