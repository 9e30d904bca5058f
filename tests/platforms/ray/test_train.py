"""Target `ray` with the emulated GKE and KubeRay; tests/emulators/kubernetes/test_ray.py tests Ray itself."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.patience import until

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud import kubernetes
from dropforge.cloud.disks import list_disks
from dropforge.cloud.listing import Listed
from dropforge.platforms.gke.requests import cluster_of, namespace_manifests
from dropforge.platforms.ray.requests import ray_job_manifest, requests
from dropforge.platforms.ray.train import CLAIMS, RAY_CLUSTER, RayJobs
from dropforge.platforms.training import Launch, Phase
from dropforge.spec import parse_spec

from ...deployments import Bound, clients, present
from ..gke.test_train import SETTINGS, STANDING, Cloud, cloud, running
from ..shared import Stages

__all__ = ["cloud", "running"]
TARGET = Bound(RayJobs(), SETTINGS)
MISSING = "us-central1-docker.pkg.dev/p1/dropforge/train-missing:v1"
RAY = replace(SETTINGS, train_ray_image=MISSING)


def launch(**target: Any) -> Launch:
    spec = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "owner/data"},
        "training": {"adapter": {"type": "none"}},
        "target": {"type": "ray", "placements": [{"region": "us-central1"}], **target},
        "serve": None,
    }
    deadline = datetime.now(UTC) + timedelta(seconds=600)
    return Launch(
        f"ray-{uuid.uuid4().hex[:12]}", 1, 0, parse_spec(json.dumps(spec).encode()), RAY, deadline, 600, key=""
    )


@pytest.fixture
def attempt(cloud: Cloud) -> Iterator[Launch]:
    """Launch an attempt in its own Autopilot cluster; delete the cluster after the test."""
    attempt = launch(cluster={"create": True})
    until(lambda: TARGET.provision(attempt) is None, bool)
    yield attempt
    Stages(TARGET).tear_down(reversed(requests(attempt)))
    assert kubernetes.find_cluster(present(), cluster_of(attempt)) is None


@pytest.fixture
def in_standing_cluster(cloud: Cloud) -> Iterator[Launch]:
    """Launch an attempt in a standing cluster that has the operator."""
    attempt = launch(cluster={"name": f"ray-{uuid.uuid4().hex[:12]}"})
    parent, _, name = cluster_of(attempt).rpartition("/clusters/")
    cluster = {
        "name": name,
        "autopilot": {"enabled": True},
        "addons_config": {"ray_operator_config": {"enabled": True}},
    }
    clients.gke().create_cluster(parent=parent, cluster=cluster)
    standing = until(lambda: kubernetes.standing_cluster(present(), cluster_of(attempt), "target.cluster.name"), bool)
    for manifest in namespace_manifests(attempt):
        kubernetes.connect(present(), standing).create(manifest)
    until(lambda: TARGET.provision(attempt) is None, bool)
    yield attempt
    clients.gke().delete_cluster(name=cluster_of(attempt))


def test_a_cluster_without_the_operator_is_refused_before_anything_is_created(cloud: Cloud) -> None:
    with pytest.raises(CloudError, match="has no Ray operator") as refused:
        TARGET.provision(launch())
    assert refused.value.error_class is ErrorClass.CONFIG
    assert "--update-addons=RayOperator=ENABLED" in refused.value.hint
    assert cloud.api.find(SETTINGS.kubernetes_namespace, "rayjobs", "ray.io") == []


def test_a_second_launch_creates_nothing_and_a_missing_image_is_reported(attempt: Launch) -> None:
    assert TARGET.provision(attempt) is None
    api = kubernetes.connect(present(), kubernetes.find_cluster(present(), cluster_of(attempt)))
    assert len(api.find(RAY.kubernetes_namespace, "rayjobs", "ray.io")) == 1
    status = until(lambda: TARGET.inspect(attempt), lambda status: status.phase is not Phase.PENDING)
    assert (status.phase, status.error_class) == (Phase.FAILED, ErrorClass.CONFIG)
    assert MISSING in status.message


def disks_of(attempt: Launch) -> list[Any]:
    return [disk for disk in list_disks(present(SETTINGS)) if isinstance(disk, Listed) and disk.run == attempt.run]


def test_the_heads_disk_that_a_deleted_cluster_leaves_is_deleted_with_it(attempt: Launch) -> None:
    """GKE deletes no disk of a claim with a cluster: only the labels of the disk lead to it."""
    cluster, _ = requests(attempt)
    [disk] = until(lambda: disks_of(attempt), bool)
    assert disk.attempt == attempt.attempt
    assert disk.labels[names.DEPLOYMENT_LABEL] == names.deployment_id(RAY.runs_bucket)
    clients.gke().delete_cluster(name=cluster.name)  # as a user does
    until(lambda: kubernetes.find_cluster(present(), cluster.name), lambda found: found is None)
    assert disks_of(attempt) == [disk]
    until(lambda: TARGET.teardown(cluster.kind, cluster.name), bool)
    assert disks_of(attempt) == []


def test_teardown_waits_for_the_claims_of_the_attempt(
    in_standing_cluster: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "GONE_WAIT_SECONDS", 0.1)
    attempt = in_standing_cluster
    job, namespace = requests(attempt)[-1], RAY.kubernetes_namespace
    api = kubernetes.connect(present(), kubernetes.find_cluster(present(), cluster_of(attempt)))
    [claim] = until(lambda: api.find(namespace, CLAIMS), bool)
    assert claim["spec"]["storageClassName"] == "standard-rwo"
    labels = claim["metadata"]["labels"]
    for name, of_run in (("held", labels), ("of-another-run", {**labels, names.RUN_LABEL: "x"})):
        metadata = {"name": name, "namespace": namespace, "labels": of_run, "finalizers": ["example.com/hold"]}
        manifest = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
        api.create({**manifest, "spec": {**claim["spec"], "volumeName": ""}})

    def left() -> tuple[bool, dict[str, bool]]:
        gone = TARGET.teardown(job.kind, job.name)
        claims = [item["metadata"] for item in api.find(namespace, CLAIMS)]
        return gone, {metadata["name"]: "deletionTimestamp" in metadata for metadata in claims}

    gone, deleting = until(left, lambda answer: answer[1].get("held") and len(answer[1]) == 2)
    assert (gone, deleting) == (False, {"held": True, "of-another-run": False})


def test_ray_clusters_left_by_a_rayjob_are_deleted_with_it(in_standing_cluster: Launch) -> None:
    attempt = in_standing_cluster
    job = requests(attempt)[-1]
    name, namespace = job.request["metadata"]["name"], RAY.kubernetes_namespace
    api = kubernetes.connect(present(), kubernetes.find_cluster(present(), cluster_of(attempt)))
    leftover = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "left", "namespace": namespace, "labels": {"ray.io/originated-from-cr-name": name}},
        "spec": ray_job_manifest(attempt)["spec"]["rayClusterSpec"],
    }
    api.create(leftover)
    other_spec = ray_job_manifest(replace(attempt, run=f"ray-{uuid.uuid4().hex[:12]}"))["spec"]["rayClusterSpec"]
    api.create({**leftover, "metadata": {"name": "another-s", "namespace": namespace}, "spec": other_spec})
    until(lambda: TARGET.teardown(job.kind, job.name), bool)
    clusters = api.find(namespace, "rayclusters", "ray.io")
    assert [cluster["metadata"]["name"] for cluster in clusters] == ["another-s"]
    assert TARGET.inspect(attempt).phase is Phase.GONE

    api.create(leftover)  # an operator that has not seen the end of the job creates the cluster again
    [listed] = [resource for resource in TARGET.listed(RAY) if resource.kind == RAY_CLUSTER]
    assert (listed.run, listed.attempt) == (attempt.run, attempt.attempt)
    until(lambda: TARGET.teardown(listed.kind, listed.name), bool)
    clusters = api.find(namespace, "rayclusters", "ray.io")
    assert [cluster["metadata"]["name"] for cluster in clusters] == ["another-s"]


def test_a_resource_that_never_existed_is_gone(cloud: Cloud) -> None:
    assert TARGET.teardown("ray.io/RayJob", f"{STANDING}/k8s/namespaces/x/ray.io/rayjobs/never-was")
    assert TARGET.inspect(launch()).phase is Phase.GONE
