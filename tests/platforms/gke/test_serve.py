"""Serving on GKE, stage by stage, with emulated clusters: Google's clients, sockets, pods that are processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.patience import until

from dropforge.base import names
from dropforge.base.clock import Clock, utc_now
from dropforge.cloud import kubernetes
from dropforge.platforms.gke import workload
from dropforge.platforms.serving import Deployment
from dropforge.run.record import ResourceState, RunState
from dropforge.run.store import RunStore
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.containers.images import ImageStore
from dropforge_local.containers.processes import end_all
from dropforge_local.emulators.container import GkeEmulator
from dropforge_local.emulators.kit.host import Host
from dropforge_local.emulators.kubernetes import KubernetesConfig, KubernetesEmulator
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.emulators.storage import StorageEmulator

from ...deployments import clients, here, intend
from ...stage_calls import deploy, sweep, teardown
from ..shared import (
    ME,
    environment,
    eventually,
    forget_clients,
    is_there,
    make_run,
    sweep_only,
    switch_faults,
    write_servers,
)

NAMESPACE = "dropforge"
T4, A100 = "nvidia-tesla-t4", "nvidia-tesla-a100"  # no other test here uses a node with these GPUs
SOON = {"startup_timeout": "1s"}
LOCATION = "projects/p1/locations/us-central1"
IMAGES = "us-docker.pkg.dev/p1/dropforge"


@dataclass
class Cloud:
    """The emulated project, and the actions of a test in it."""

    url: str
    store: RunStore
    kubernetes: KubernetesEmulator
    server: BackgroundServer

    def run(self, image: str = "serve-noop", **serve: Any) -> str:
        """Store a run that has trained and whose model must now be served; return its id."""
        os.environ["DROPFORGE_SERVE_VLLM_IMAGE"] = f"{IMAGES}/{image}:test"
        here.cache_clear()
        return make_run(self.store, spec(**serve))

    def deploy(self, run: str) -> dict[str, Any]:
        """Call the deploy stage until its answer is no longer "call again"; return the last answer."""
        return eventually(lambda: deploy(run, ME))

    def objects(self, run: str, cluster: str = "c1") -> list[str]:
        """Return plural and name of each object that a cluster has for a run's endpoint and training."""
        api = kubernetes.connect(here().cloud, kubernetes.find_cluster(here().cloud, f"{LOCATION}/clusters/{cluster}"))
        objects = []
        for group, plural in [
            ("apps", "deployments"),
            ("", "services"),
            ("", "pods"),
            ("autoscaling", "horizontalpodautoscalers"),
            ("monitoring.googleapis.com", "podmonitorings"),
        ]:
            items = api.find(NAMESPACE, plural, group, labelSelector=f"{names.RUN_LABEL}={run}")
            objects += [f"{plural}/{item['metadata']['name']}" for item in items]
        return objects

    def faults(self, api: str, **switches: Any) -> None:
        switch_faults(self.url, api, **switches)


def spec(**serve: Any) -> dict[str, Any]:
    placements = [{"region": "us-central1"}]
    return {
        "api_version": "dropforge/v1",
        "name": "noop",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "owner/data"},
        "target": {"type": "gke", "placements": placements},
        "serve": {"type": "gke", "ttl": "1h", **serve},
    }


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    home = tmp_path_factory.mktemp("gke")
    write_servers(home)
    emulators: dict[str, Any] = {}

    def build() -> list[Any]:
        db, clock = Database(home / "state.db"), SystemClock()
        emulators["kubernetes"] = KubernetesEmulator(
            Host(
                db,
                clock,
                ImageStore(home / "repo", home / "images", Path(sys.executable)),
                home / "pods",
                lambda account: {},
            ),
            authorize=lambda headers: headers.get("Authorization") == "Bearer good",
            config=KubernetesConfig(node_seconds=0.05, restart_seconds=0.1, pull_retry_seconds=0.1, probe_seconds=0.05),
        )
        emulators["gke"] = GkeEmulator(db, clock, kubernetes=emulators["kubernetes"])
        for cluster in ("c1", "c2", "c3"):
            emulators["gke"].ensure_cluster(f"{LOCATION}/clusters/{cluster}")
            emulators["kubernetes"].ensure_objects(f"{LOCATION}/clusters/{cluster}", cluster_objects())
        storage = StorageEmulator(db, home / "blobs", clock)
        storage.create_bucket("runs")
        pubsub = PubSubEmulator(db, clock)
        pubsub.create_topic("projects/p1/topics/run-events")
        return [storage, pubsub, emulators["kubernetes"], emulators["gke"]]

    server = BackgroundServer(build)
    with server as running, patch.dict(os.environ):
        os.environ |= environment(running.url, running.grpc_address, GKE_CLUSTER="c1")
        forget_clients()
        store = RunStore(clients.storage(), "runs")
        yield Cloud(running.url, store, emulators["kubernetes"], server)
        clients.publisher().stop()
        clients.publisher().transport.close()
    forget_clients()
    end_all(home / "pods", grace_seconds=0)


def cluster_objects() -> list[dict[str, Any]]:
    account = {"name": "dropforge-server", "namespace": NAMESPACE}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account},
    ]


def test_an_endpoint_answers_outlives_its_run_and_is_swept(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep_only("gke", monkeypatch)
    run = cloud.run(max_instances=3)
    training = kubernetes.resource_of(
        f"{LOCATION}/clusters/c1",
        {"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": NAMESPACE, "name": f"df-{run}-a1"}},
    )
    intend(cloud.store, run, training.kind, training.name, 1)
    assert cloud.deploy(run)["status"] == "READY"
    assert deploy(run, ME)["status"] == "READY"  # the second call creates nothing
    record = cloud.store.record(run)
    assert record.endpoint
    assert record.endpoint.url.startswith("http://127.0.0.1:")
    assert record.endpoint.service.endswith(f"/clusters/c1/k8s/namespaces/{NAMESPACE}/apps/deployments/df-{run}-serve")
    kinds = [name.partition("/")[0] for name in cloud.objects(run)]
    assert kinds == ["deployments", "services", "pods", "horizontalpodautoscalers", "podmonitorings"]

    # The end of an attempt and of the run delete the training's objects and keep the endpoint.
    for scope in (1, "run"):
        assert eventually(partial(teardown, run, ME, scope, True))["status"] == "GONE"
    entries = cloud.store.ledger(run).remaining()
    assert {entry.kind for entry in entries} == {
        "apps.k8s.io/Deployment",
        "k8s.io/Service",
        "autoscaling.k8s.io/HorizontalPodAutoscaler",
        "monitoring.googleapis.com/PodMonitoring",
    }
    assert all(names.is_endpoint(entry.name, run) for entry in entries)
    cloud.store.update(run, lambda record: record.entered(RunState.SUCCEEDED, utc_now()))

    assert sweep()["deleted"] == []  # it has not expired
    assert is_there(cloud.store, run)
    monkeypatch.setattr(Clock, "now", lambda _: utc_now() + timedelta(days=2))
    until(lambda: sweep()["deleted"] == [] and cloud.objects(run) == [])
    assert not is_there(cloud.store, run)
    assert not is_there(cloud.store, cloud.run(cluster="no-such"))
    assert cloud.store.ledger(run).remaining() == []
    ended = cloud.store.record(run).endpoint
    assert ended
    assert ended.ended


def test_a_sweep_continues_after_an_api_that_does_not_answer(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The API of a cluster is down, an object cannot be deleted yet, and the ledger has every entry as gone."""
    sweep_only("gke", monkeypatch)
    run = cloud.run(cluster="c2")
    assert cloud.deploy(run)["status"] == "READY"
    for entry in cloud.store.ledger(run).entries:
        cloud.store.note(run, entry.name, ResourceState.GONE)
    cloud.server.call(cloud.kubernetes.remove_cluster(f"{LOCATION}/clusters/c3"))  # GKE still lists the cluster
    cloud.faults("kubernetes", fail_next={"cluster": "c2", "verb": "delete", "resource": "services", "code": 403})
    monkeypatch.setattr(Clock, "now", lambda _: utc_now() + timedelta(days=2))
    first = sweep()["deleted"]
    assert not [name for name in first if "/services/" in name]
    until(lambda: sweep()["deleted"] == [] and cloud.objects(run, "c2") == [])
    assert "clusters/c3" in capsys.readouterr().err


@pytest.mark.parametrize(("own", "warnings"), [("", 1), ("c1", 2)], ids=["without", "with"])
def test_a_project_without_gke_is_swept(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own: str, warnings: int
) -> None:
    """The sweep logs the missing API once; with a standing cluster in the settings, every sweep logs it."""
    sweep_only("gke", monkeypatch)
    monkeypatch.setenv("DROPFORGE_GKE_CLUSTER", own)
    here.cache_clear()
    message = f"Kubernetes Engine API has not been used in project {own}1 before or it is disabled."
    fault = {"method": "list_clusters", "status": "PERMISSION_DENIED", "message": message, "count": 20}
    cloud.faults("container", fail_next=fault)
    assert [sweep()["deleted"], sweep()["deleted"]] == [[], []]
    cloud.faults("container", fail_next=[])
    assert capsys.readouterr().err.count(message) == warnings
    here.cache_clear()


@pytest.mark.parametrize(
    ("image", "serve", "faults", "expected", "text"),
    [
        ("serve-missing", {}, {}, "config", "serve-missing:test"),
        ("serve-crash", {}, {}, "code", "exit code 70 (Error): the weights do not fit"),
        ("serve-noop", {**SOON, "accelerator": T4}, {"stockout": [T4]}, "stockout", "GCE out of resources"),
        ("serve-noop", {**SOON, "accelerator": A100}, {"quota": {A100: 0}}, "quota", "GCE quota exceeded"),
        ("serve-deaf", {"startup_timeout": "8s"}, {}, "code", "container server is not ready: Startup probe failed"),
        ("serve-noop", {"cluster": "none"}, {}, "config", "clusters/none does not exist"),
    ],
    ids=["no-image", "crash", "stockout", "quota", "deaf", "no-cluster"],
)
def test_the_reason_that_an_endpoint_does_not_answer_is_reported(
    cloud: Cloud, image: str, serve: dict[str, Any], faults: dict[str, Any], expected: str, text: str
) -> None:
    cloud.faults("kubernetes", **faults)
    with patch.object(workload, "READY_WAIT_SECONDS", 1.0):
        run = cloud.run(image, **serve)
        answer = cloud.deploy(run)
    cloud.faults("kubernetes", stockout=[], quota={}, fail_next=[])
    assert answer["status"] == "FAILED", answer
    assert answer["error"]["error_class"] == expected
    assert text in answer["error"]["message"]
    assert answer["error"]["hint"]
    assert eventually(lambda: teardown(run, ME, "run", False))["status"] == "GONE"
    assert cloud.objects(run) == []


def test_a_missing_service_account_is_reported_at_once(cloud: Cloud) -> None:
    with patch.dict(os.environ, {"DROPFORGE_KUBERNETES_SERVER_ACCOUNT": "missing"}):
        run = cloud.run()
        answer = cloud.deploy(run)
    here.cache_clear()
    assert answer["error"]["error_class"] == "config"
    assert 'serviceaccount "missing" not found' in answer["error"]["message"]
    assert eventually(lambda: teardown(run, ME, "run", False))["status"] == "GONE"


def test_a_name_that_another_owner_uses_is_refused(cloud: Cloud) -> None:
    run = cloud.run()
    other = Deployment("other-0123456789ab", cloud.store.spec(run), here().settings, utc_now())
    manifest = workload.service_manifest(workload.own_workload(other))
    manifest["metadata"]["name"] = names.endpoint_name(run)
    api = kubernetes.connect(here().cloud, kubernetes.find_cluster(here().cloud, f"{LOCATION}/clusters/c1"))
    assert api.create(manifest)
    answer = cloud.deploy(run)
    assert answer["error"]["error_class"] == "config"
    assert "other-0123456789ab" in answer["error"]["message"]
    assert eventually(lambda: teardown(run, ME, "run", False))["status"] == "GONE"
