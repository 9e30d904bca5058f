"""GKE with Google's own client and gcloud: clusters, their pods, operations, refusals and restarts."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google.api_core.exceptions as refused
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import container_v1
from kubernetes import client
from tests.patience import PATIENCE_SECONDS

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Emulator
from dropforge_local.containers.images import ImageStore
from dropforge_local.containers.processes import end_all
from dropforge_local.emulators.container import GkeConfig, GkeEmulator
from dropforge_local.emulators.kit.host import Host
from dropforge_local.emulators.kubernetes import KubernetesConfig, KubernetesEmulator

from ..clocks import HeldClock

PARENT = "projects/p1/locations/us-central1"
Status = container_v1.Cluster.Status
DOCKERFILE = (
    'FROM python:3.11\nWORKDIR /app\nCOPY containers/nap/main.py /app/\nENTRYPOINT ["python", "-S", "/app/main.py"]\n'
)


def build(home: Path, held: HeldClock | None = None) -> Sequence[Emulator]:
    db, clock = Database(home / "state.db"), SystemClock()
    kubernetes = KubernetesEmulator(
        Host(
            db,
            clock,
            ImageStore(home / "repo", home / "images", Path(sys.executable)),
            home / "containers",
            lambda account: {},
        ),
        authorize=lambda headers: headers.get("Authorization") == "Bearer good",
        config=KubernetesConfig(node_seconds=0.05),
    )
    return [
        kubernetes,
        GkeEmulator(db, held or clock, kubernetes=kubernetes, config=GkeConfig(create_seconds=0.3, delete_seconds=0.2)),
    ]


@dataclass
class Gke:
    url: str
    home: Path
    clock: HeldClock = field(default_factory=HeldClock)

    @property
    def client(self) -> container_v1.ClusterManagerClient:
        options = {"api_endpoint": self.url}
        return container_v1.ClusterManagerClient(
            transport="rest", client_options=options, credentials=AnonymousCredentials()
        )

    def create(self, name: str, **fields: Any) -> container_v1.Operation:
        cluster = {"name": name, "autopilot": {"enabled": True}, **fields}
        return self.client.create_cluster(parent=PARENT, cluster=cluster, timeout=60)

    def get(self, name: str) -> container_v1.Cluster:
        return self.client.get_cluster(name=f"{PARENT}/clusters/{name}", retry=None)

    def delete(self, name: str) -> container_v1.Operation:
        return self.client.delete_cluster(name=f"{PARENT}/clusters/{name}", retry=None)

    def finish(self, operation: container_v1.Operation) -> container_v1.Operation:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while operation.status != container_v1.Operation.Status.DONE:
            assert time.monotonic() < deadline, operation
            time.sleep(0.05)
            operation = self.client.get_operation(name=f"{PARENT}/operations/{operation.name}", retry=None)
        return operation

    def ready(self, name: str, **fields: Any) -> container_v1.Cluster:
        operation = self.finish(self.create(name, **fields))
        assert not operation.error.message
        return self.get(name)

    def faults(self, **switches: Any) -> None:
        url, data = f"{self.url}/_local/container/faults", json.dumps(switches).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data, method="POST"), timeout=60):
            pass


@pytest.fixture
def gke(tmp_path: Path) -> Iterator[Gke]:
    folder = tmp_path / "repo" / "containers" / "nap"
    folder.mkdir(parents=True)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    (folder / "main.py").write_text(
        "import os, signal, time\nsignal.signal(15, lambda *_: os._exit(0))\ntime.sleep(600)\n"
    )
    clock = HeldClock()
    with BackgroundServer(lambda: build(tmp_path, clock)) as server:
        yield Gke(server.url, tmp_path, clock)
    end_all(tmp_path / "containers", grace_seconds=0)


def kube(cluster: container_v1.Cluster, token: str = "good") -> client.ApiClient:
    """A Kubernetes client made only from GKE's answer."""
    authority = base64.b64decode(cluster.master_auth.cluster_ca_certificate).decode()
    configuration = client.Configuration(host=f"https://{cluster.endpoint}", ca_cert_data=authority)
    configuration.api_key = {"authorization": f"Bearer {token}"}
    return client.ApiClient(configuration)


def create_pod(core: client.CoreV1Api, name: str) -> None:
    spec = client.V1PodSpec(containers=[client.V1Container(name="main", image="x/nap:v1")])
    core.create_namespaced_pod("default", client.V1Pod(metadata=client.V1ObjectMeta(name=name), spec=spec))


def phase(core: client.CoreV1Api, name: str) -> str:
    status = core.read_namespaced_pod(name, "default").status
    return str(status and status.phase)


def test_a_cluster_is_created_and_deleted(gke: Gke) -> None:
    with gke.clock.hold():
        operation = gke.create("c1", resource_labels={"dropforge-run": "r1"}, release_channel={"channel": "RAPID"})
        assert operation.operation_type == container_v1.Operation.Type.CREATE_CLUSTER
        assert operation.target_link.endswith(f"{PARENT}/clusters/c1")
        assert (gke.get("c1").status, gke.get("c1").endpoint) == (Status.PROVISIONING, "")
    gke.finish(operation)
    cluster = gke.get("c1")
    assert (cluster.status, cluster.resource_labels["dropforge-run"]) == (Status.RUNNING, "r1")
    assert cluster.workload_identity_config.workload_pool == "p1.svc.id.goog"
    with gke.clock.hold():
        deletion = gke.delete("c1")
        assert gke.get("c1").status == Status.STOPPING
    gke.finish(deletion)
    with pytest.raises(refused.NotFound, match=f"Not found: {PARENT}/clusters/c1"):
        gke.get("c1")
    assert not gke.client.list_clusters(parent="projects/p1/locations/-").clusters


def test_gkes_answer_suffices_to_reach_the_cluster(gke: Gke) -> None:
    cluster = gke.ready("c1")
    with kube(cluster) as api:
        core = client.CoreV1Api(api)
        create_pod(core, "a")
        assert len(core.list_namespaced_pod("default").items) == 1
        assert phase(core, "a")
    with kube(cluster, "bad") as api, pytest.raises(client.exceptions.UnauthorizedException):
        client.CoreV1Api(api).list_namespaced_pod("default")
    unknown = pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED")
    with unknown, urllib.request.urlopen(f"https://{cluster.endpoint}/livez", timeout=60):
        pass


def test_a_deletion_ends_the_clusters_pods(gke: Gke) -> None:
    cluster = gke.ready("c1")
    with kube(cluster) as api:
        core = client.CoreV1Api(api)
        create_pod(core, "a")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while phase(core, "a") != "Running":
            assert time.monotonic() < deadline
            time.sleep(0.05)
    gke.finish(gke.delete("c1"))
    db = Database(gke.home / "state.db")
    assert (KubernetesEmulator.names_in(db), GkeEmulator.names_in(db)) == ([], [])
    db.close()
    assert end_all(gke.home / "containers", grace_seconds=0) == []
    with (
        pytest.raises(OSError, match="refused"),
        urllib.request.urlopen(f"https://{cluster.endpoint}/livez", timeout=60),
    ):
        pass


def test_a_second_operation_is_refused(gke: Gke) -> None:
    with gke.clock.hold():
        operation = gke.create("c1")
        with pytest.raises(refused.BadRequest, match=f"Cluster is running incompatible operation {operation.name}"):
            gke.delete("c1")
        with pytest.raises(refused.Conflict, match="Already exists"):
            gke.create("c1")
    gke.finish(operation)


def test_labels_change_under_their_fingerprint(gke: Gke) -> None:
    cluster = gke.ready("c1", resource_labels={"a": "1"})
    name = f"{PARENT}/clusters/c1"
    request = {"name": name, "resource_labels": {"a": "2"}, "label_fingerprint": cluster.label_fingerprint}
    gke.finish(gke.client.set_labels(request=request))
    assert dict(gke.get("c1").resource_labels) == {"a": "2"}
    with pytest.raises(refused.BadRequest, match="fingerprint mismatch"):
        gke.client.set_labels(request=request)


@pytest.mark.parametrize(
    ("fields", "parent", "error", "text"),
    [
        ({"name": "C1"}, PARENT, refused.BadRequest, "cluster.name is 'C1'"),
        ({"name": "c" * 41}, PARENT, refused.BadRequest, "at most 40"),
        ({}, "projects/p1/locations/us-central1-a", refused.BadRequest, "must be regional"),
        ({}, "projects/p1/locations/moon", refused.BadRequest, "'moon' does not exist"),
        ({"autopilot": {"enabled": False}}, PARENT, refused.GoogleAPICallError, "Standard clusters are not emulated"),
        ({"initial_node_count": 3}, PARENT, refused.BadRequest, "initial_node_count is not allowed"),
        ({"node_pools": [{"name": "p"}]}, PARENT, refused.BadRequest, "node_pools is not allowed"),
        ({"resource_labels": {"Run": "1"}}, PARENT, refused.BadRequest, "resource label"),
    ],
)
def test_bad_clusters_are_refused(gke: Gke, fields: dict[str, Any], parent: str, error: Any, text: str) -> None:
    cluster = {"name": "c1", "autopilot": {"enabled": True}, **fields}
    with pytest.raises(error, match=text):
        gke.client.create_cluster(parent=parent, cluster=cluster)
    assert not gke.client.list_clusters(parent="projects/p1/locations/-").clusters


def test_unknown_fields_are_refused(gke: Gke) -> None:
    body = json.dumps({"cluster": {"name": "c1", "autopilott": {}}}).encode()
    request = urllib.request.Request(f"{gke.url}/v1/{PARENT}/clusters", body, method="POST")
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(request, timeout=60)
    with answer.value as error:
        assert (error.code, "autopilott" in error.read().decode()) == (400, True)


def test_autopilot_refuses_node_pools(gke: Gke) -> None:
    gke.ready("c1")
    parent = f"{PARENT}/clusters/c1"
    assert not gke.client.list_node_pools(parent=parent).node_pools
    with pytest.raises(refused.BadRequest, match="do not support mutating node pools"):
        gke.client.create_node_pool(parent=parent, node_pool={"name": "p"})
    assert gke.client.get_server_config(name=PARENT).default_cluster_version.startswith("1.33")


def test_quota_stock_out_and_missing_permission(gke: Gke) -> None:
    gke.faults(quota={"us-central1": 0})
    with pytest.raises(refused.Forbidden, match="Insufficient regional quota"):
        gke.create("c1")
    gke.faults(quota={}, fail_next={"method": "create_cluster", "status": "PERMISSION_DENIED", "message": "no"})
    with pytest.raises(refused.Forbidden, match="no"):
        gke.create("c1")
    gke.faults(stockout=["us-central1"])
    operation = gke.finish(gke.create("c1"))
    assert (operation.error.code, "GCE_STOCKOUT" in operation.error.message) == (8, True)
    cluster = gke.get("c1")
    assert (cluster.status, cluster.conditions[0].code) == (
        Status.ERROR,
        container_v1.StatusCondition.Code.GCE_STOCKOUT,
    )
    gke.finish(gke.delete("c1"))


def test_a_call_can_fail_after_its_effect(gke: Gke) -> None:
    gke.faults(fail_next={"method": "create_cluster", "status": "UNAVAILABLE", "after_effect": True})
    with gke.clock.hold():
        with pytest.raises(refused.ServiceUnavailable):
            gke.create("c1")
        assert gke.get("c1").status == Status.PROVISIONING


def test_the_next_stack_finds_clusters_and_avoids_taken_ports(gke: Gke, tmp_path: Path) -> None:
    operation = gke.create("c1")
    first = gke.finish(operation)
    cluster = gke.get("c1")
    pending = gke.create("c2")
    copy = tmp_path / "second"
    shutil.copytree(tmp_path / "repo", copy / "repo")
    source, target = Database(tmp_path / "state.db"), Database(copy / "state.db")
    source.connection.backup(target.connection)
    source.close()
    target.close()
    with BackgroundServer(lambda: build(copy)) as server:
        again = Gke(server.url, copy)
        assert again.finish(pending).status == first.status
        moved = again.get("c1")  # because the first stack still listens at the port
        assert (moved.master_auth, moved.endpoint == cluster.endpoint) == (cluster.master_auth, False)
        with kube(moved) as api:
            assert client.CoreV1Api(api).read_namespace("default").status
        assert again.get("c2").status == Status.RUNNING


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_manages_clusters(gke: Gke, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_CONTAINER": f"{gke.url}/",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_SERVICEUSAGE": f"{gke.url}/",
        "CLOUDSDK_CORE_PROJECT": "p1",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    }

    def gcloud(*arguments: str) -> str:
        command = ["gcloud", "container", "clusters", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"
        return done.stdout

    gcloud("create-auto", "made", "--location=us-central1", "--release-channel=rapid", "--async")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while gke.get("made").status != Status.RUNNING:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert json.loads(gcloud("list", "--format=json"))[0]["name"] == "made"
    described = json.loads(gcloud("describe", "made", "--location=us-central1", "--format=json"))
    assert (described["autopilot"]["enabled"], described["status"]) == (True, "RUNNING")
    gcloud("delete", "made", "--location=us-central1", "--async", "--quiet")
    while gke.client.list_clusters(parent=PARENT).clusters:
        assert time.monotonic() < deadline + 30
        time.sleep(0.1)
