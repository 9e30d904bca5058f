"""Ephemeral volumes: the claims and disks that Kubernetes makes for a pod, and deletes with it."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client
from kubernetes.client import exceptions

from .conftest import Kube, make_container

MOUNTS = {"volumeMounts": [{"name": "work", "mountPath": "/work"}]}


def volume(storage_class: str | None = "standard-rwo", **labels: str) -> dict[str, Any]:
    claim: dict[str, Any] = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}}
    if storage_class is not None:
        claim["storageClassName"] = storage_class
    template = {"metadata": {"labels": labels}, "spec": claim}
    return {"name": "work", "ephemeral": {"volumeClaimTemplate": template}}


def claims(kube: Kube) -> list[Any]:
    return list(kube.core.list_namespaced_persistent_volume_claim(kube.namespace).items)


def volumes(kube: Kube) -> list[Any]:
    found = kube.core.list_persistent_volume().items
    return [item for item in found if item.spec.claim_ref.namespace == kube.namespace]


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_a_pod_has_a_disk_that_is_deleted_with_it(kube: Kube, propagation: str) -> None:
    """With Foreground the pod waits for its claim, and the claim for the pod: Kubernetes lets the claim go first."""
    init = make_container("write", "/work/file", "kept", name="init", **MOUNTS)
    kube.create_pod("a", "polite", "0", initContainers=[init], container=MOUNTS, volumes=[volume(team="x")])
    kube.wait_pod("a", "Running")
    (claim,) = claims(kube)
    assert (claim.metadata.name, claim.metadata.labels) == ("a-work", {"team": "x"})
    (owner,) = claim.metadata.owner_references
    assert (owner.kind, owner.uid, owner.controller) == ("Pod", kube.pod("a").metadata.uid, True)
    assert (claim.status.phase, claim.status.capacity) == ("Bound", {"storage": "20Gi"})
    (disk,) = volumes(kube)
    assert disk.metadata.name == claim.spec.volume_name == f"pvc-{claim.metadata.uid}"
    assert disk.spec.csi.volume_handle == f"projects/p1/zones/us-central1-a/disks/{disk.metadata.name}"

    # A claim in use is kept until its pod ends.
    kube.core.delete_namespaced_persistent_volume_claim("a-work", kube.namespace)
    (claim,) = claims(kube)
    assert claim.metadata.deletion_timestamp is not None
    kube.core.delete_namespaced_pod("a", kube.namespace, propagation_policy=propagation)
    kube.until(lambda: (kube.pods(), claims(kube), volumes(kube)), lambda left: left == ([], [], []))


def test_containers_of_a_pod_share_its_disk_and_pods_do_not(kube: Kube) -> None:
    init = make_container("write", "/work/file", "from init", name="init", **MOUNTS)
    kube.create_pod("a", "read", "/work/file", initContainers=[init], container=MOUNTS, volumes=[volume()])
    kube.create_pod("b", "read", "/work/file", container=MOUNTS, volumes=[volume(None)])
    kube.wait_pod("a", "Succeeded")
    assert kube.log("a", container="main").splitlines()[-1] == "from init"
    kube.wait_pod("b", "Failed")
    assert {claim.spec.storage_class_name for claim in claims(kube)} == {"standard-rwo"}  # the default class


def test_a_pod_waits_for_the_class_of_its_disk(kube: Kube) -> None:
    name = f"late-{kube.namespace}"
    kube.create_pod("a", container=MOUNTS, volumes=[volume(name)])
    expected = f'storageclass.storage.k8s.io "{name}" not found'
    kube.until(lambda: dict(kube.events("a-work")).get("ProvisioningFailed", ""), lambda text: text == expected)
    assert kube.pod("a").status.phase == "Pending"
    late = {
        "metadata": {"name": name},
        "provisioner": "pd.csi.storage.gke.io",
        "parameters": {"type": "pd-balanced"},
        "volumeBindingMode": "WaitForFirstConsumer",
        "reclaimPolicy": "Retain",
    }
    classes = client.StorageV1Api(kube.api)
    made: Any = late
    classes.create_storage_class(made)
    kube.wait_pod("a", "Succeeded")
    kube.core.delete_namespaced_pod("a", kube.namespace)
    kube.until(lambda: claims(kube), lambda left: left == [])
    (kept,) = volumes(kube)
    assert kept.status.phase == "Released"


def test_a_claim_of_another_owner_is_not_used(kube: Kube) -> None:
    spec = volume()["ephemeral"]["volumeClaimTemplate"]["spec"]
    kube.core.create_namespaced_persistent_volume_claim(kube.namespace, {"metadata": {"name": "a-work"}, "spec": spec})
    kube.create_pod("a", container=MOUNTS, volumes=[volume()])
    expected = 'PVC "a-work" was not created for pod "a" (pod is not owner)'
    kube.until(lambda: dict(kube.events("a")).get("FailedScheduling", ""), lambda text: text == expected)
    assert kube.pod("a").spec.node_name is None


def test_a_disk_that_compute_engine_refuses_is_reported(kube: Kube) -> None:
    small = volume()
    small["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"] = "1Gi"
    kube.create_pod("a", container=MOUNTS, volumes=[small])
    text = kube.until(lambda: dict(kube.events("a-work")).get("ProvisioningFailed", ""), bool)
    assert "Expected 10 to 65536" in text


def test_the_class_of_a_claim_cannot_change(kube: Kube) -> None:
    spec = volume()["ephemeral"]["volumeClaimTemplate"]["spec"]
    kube.core.create_namespaced_persistent_volume_claim(kube.namespace, {"metadata": {"name": "c"}, "spec": spec})
    change = {"spec": {"storageClassName": "premium-rwo"}}
    with pytest.raises(exceptions.ApiException, match="spec is immutable after creation"):
        kube.core.patch_namespaced_persistent_volume_claim("c", kube.namespace, change)
