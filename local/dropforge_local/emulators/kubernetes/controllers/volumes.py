"""Claims of volumes: made for pods' ephemeral volumes, bound to disks of Compute Engine, and released with their pods.

https://kubernetes.io/docs/concepts/storage/ephemeral-volumes/#generic-ephemeral-volumes
https://kubernetes.io/docs/concepts/storage/persistent-volumes/
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from dropforge_local.base.errors import ApiError

from ...compute.disks import Disks
from ...compute.rules import check_zone, make_disk
from ..admission import DEFAULT_CLASS
from ..defaults import PROTECTED_CLAIM
from ..kinds import CLAIM, POD, STORAGE_CLASS, VOLUME
from ..quantities import parse_quantity
from ..store import Change, Object, Store
from .loop import Key
from .owned import OwnerController, Tools, all_keys, controller_of, owner_reference

SELECTED_NODE = "volume.kubernetes.io/selected-node"
DRIVER = "pd.csi.storage.gke.io"
CONSUMER = "WaitForFirstConsumer"
GIB = 2**30
# The classes that GKE makes: https://cloud.google.com/kubernetes-engine/docs/concepts/persistent-volumes#storageclasses
CLASSES = [
    {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name, "annotations": {DEFAULT_CLASS: "true"} if name == "standard-rwo" else {}},
        "provisioner": DRIVER,
        "parameters": {"type": disk_type},
        "volumeBindingMode": CONSUMER,
    }
    for name, disk_type in (("standard-rwo", "pd-balanced"), ("premium-rwo", "pd-ssd"))
]


def ephemeral_volumes(pod: Object) -> Iterator[tuple[str, Object]]:
    """The names of the claims of a pod's ephemeral volumes, with their templates."""
    for volume in pod["spec"].get("volumes", ()):
        if "ephemeral" in volume:
            yield f"{pod['metadata']['name']}-{volume['name']}", volume["ephemeral"]["volumeClaimTemplate"]


def claim_of(store: Store, pod: Object, name: str) -> Object | None:
    """A claim by its name, if Kubernetes made it for this pod."""
    claim = store.find(CLAIM, pod["metadata"]["namespace"], name)
    owner = controller_of(claim) if claim else None
    return claim if owner and owner["uid"] == pod["metadata"]["uid"] else None


def disk_of(store: Store, claim: Object) -> str:
    """The full name of a bound claim's disk."""
    volume = store.find(VOLUME, "", claim["spec"]["volumeName"])
    assert volume is not None, "a volume is deleted with its claim"
    return str(volume["spec"]["csi"]["volumeHandle"])


class EphemeralVolumes(OwnerController):
    """Makes the claims of pods' ephemeral volumes. The pod owns the claim, which is therefore deleted with it."""

    kind = POD

    def reconcile(self, key: Key) -> None:
        pod = self._tools.store.find(POD, *key)
        if pod is None or "deletionTimestamp" in pod["metadata"]:
            return
        for name, template in ephemeral_volumes(pod):
            if self._tools.store.find(CLAIM, key[0], name) is None:
                own = template.get("metadata", {})
                metadata = {**own, "name": name, "ownerReferences": [owner_reference(POD, pod)]}
                claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
                self._tools.objects.create(CLAIM, key[0], {**claim, "spec": json.loads(json.dumps(template["spec"]))})


class ClaimController:
    """Binds claims to new disks, and keeps a deleted claim while a pod uses it. Its keys are claims."""

    def __init__(self, tools: Tools, disks: Disks) -> None:
        self._tools = tools
        self._disks = disks

    def keys(self, change: Change) -> Iterator[Key]:
        if change.kind == CLAIM:
            yield change.namespace, change.name
        elif change.kind == POD:
            yield from ((change.namespace, name) for name, _ in ephemeral_volumes(change.item))
        elif change.kind == STORAGE_CLASS:
            yield from self.all_keys()

    def all_keys(self) -> list[Key]:
        return all_keys(self._tools.store, CLAIM)

    def reconcile(self, key: Key) -> None:
        claim = self._tools.store.find(CLAIM, *key)
        if claim is None:
            return
        if "deletionTimestamp" in claim["metadata"]:
            if not self._is_used(claim):
                self._release(claim)
                self._tools.objects.remove_finalizer(CLAIM, claim, PROTECTED_CLAIM)
        elif claim["status"]["phase"] == "Pending":
            self._provision(claim)

    def _is_used(self, claim: Object) -> bool:
        """Whether a pod on a node has the claim. A pod that only waits for its dependents' deletion does not count."""
        metadata = claim["metadata"]
        for pod in self._tools.store.items(POD, metadata["namespace"]):
            ended = "deletionTimestamp" in pod["metadata"] and not pod["metadata"].get("deletionGracePeriodSeconds")
            if pod["spec"].get("nodeName") and not ended and metadata["name"] in dict(ephemeral_volumes(pod)):
                return True
        return False

    def _provision(self, claim: Object) -> None:
        name = claim["spec"].get("storageClassName", "")
        storage_class = self._tools.store.find(STORAGE_CLASS, "", name)
        if storage_class is None:
            self._tell(claim, "Warning", "ProvisioningFailed", f'storageclass.storage.k8s.io "{name}" not found')
            return
        node = claim["metadata"].get("annotations", {}).get(SELECTED_NODE, "")
        if storage_class["volumeBindingMode"] == CONSUMER and not node:
            text = "waiting for first consumer to be created before binding"
            self._tell(claim, "Normal", "WaitForFirstConsumer", text)
            return
        try:
            disk = self._make_disk(claim, storage_class, node)
        except ApiError as error:
            text = f'failed to provision volume with StorageClass "{name}": {error.message}'
            self._tell(claim, "Warning", "ProvisioningFailed", text)
            return
        self._bind(claim, storage_class, disk)

    def _make_disk(self, claim: Object, storage_class: Object, node: str) -> str:
        """The full name of a new disk, attached to the node. Raises ApiError for what Compute Engine refuses."""
        _, project, _, location, _, cluster = self._tools.store.cluster.split("/")
        zone = location if location.count("-") == 2 else f"{location}-a"
        parent = f"projects/{project}/zones/{zone}"
        check_zone(parent)
        if storage_class["provisioner"] != DRIVER:
            raise ApiError("UNIMPLEMENTED", f"the local stack provisions disks of {DRIVER} only")
        parameters = storage_class.get("parameters", {})
        labels = dict(pair.split("=", 1) for pair in parameters.get("labels", "").split(",") if "=" in pair)
        metadata = claim["metadata"]
        about = {
            "kubernetes.io/created-for/pvc/name": metadata["name"],
            "kubernetes.io/created-for/pvc/namespace": metadata["namespace"],
        }
        body = {
            "name": f"pvc-{metadata['uid']}",
            "sizeGb": str(-int(-parse_quantity(claim["spec"]["resources"]["requests"]["storage"]) // GIB)),
            "type": parameters.get("type", "pd-standard"),
            "labels": {"goog-k8s-cluster-name": cluster, **labels},
            "description": json.dumps(about),
        }
        disk_id = random.getrandbits(62)
        disk = make_disk(body, parent, disk_id, self._tools.now())
        name = f"{parent}/disks/{body['name']}"
        self._disks.add(name, disk_id, {**disk, "status": "READY"})
        if node:
            self._disks.attach(name, f"{parent}/instances/{node}")
        return name

    def _bind(self, claim: Object, storage_class: Object, disk: str) -> None:
        spec, metadata = claim["spec"], claim["metadata"]
        capacity = {"storage": spec["resources"]["requests"]["storage"]}
        reference = {key: metadata[key] for key in ("name", "namespace", "uid")}
        manifest = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": disk.rpartition("/")[2]},
            "spec": {
                "accessModes": spec["accessModes"],
                "capacity": capacity,
                "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **reference},
                "csi": {"driver": DRIVER, "volumeHandle": disk, "fsType": "ext4"},
                "persistentVolumeReclaimPolicy": storage_class["reclaimPolicy"],
                "storageClassName": storage_class["metadata"]["name"],
                "volumeMode": "Filesystem",
            },
        }
        volume = self._tools.objects.create(VOLUME, "", manifest)
        self._tools.store.replace(VOLUME, {**volume, "status": {"phase": "Bound"}})
        claim["spec"]["volumeName"] = volume["metadata"]["name"]
        claim["status"] = {"phase": "Bound", "accessModes": spec["accessModes"], "capacity": capacity}
        self._tools.store.replace(CLAIM, claim)
        text = f"Successfully provisioned volume {volume['metadata']['name']}"
        self._tell(claim, "Normal", "ProvisioningSucceeded", text)

    def _release(self, claim: Object) -> None:
        """Delete a claim's volume and its disk, unless the class retains them."""
        volume = self._tools.store.find(VOLUME, "", claim["spec"].get("volumeName", ""))
        if volume is None:
            return
        disk = volume["spec"]["csi"]["volumeHandle"]
        if volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete":
            self._disks.delete(disk)
            self._tools.store.remove(VOLUME, volume)
        else:
            self._disks.release(disk)
            self._tools.store.replace(VOLUME, {**volume, "status": {"phase": "Released"}})

    def _tell(self, claim: Object, event_type: str, reason: str, message: str) -> None:
        self._tools.recorder.record(CLAIM, claim, event_type, reason, message, "persistentvolume-controller")
