"""Target `gke` with the emulated GKE and Kubernetes APIs, over sockets: from the request to the deletion."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google.auth
import pytest
from google.cloud import container_v1
from tests.patience import until

from dropforge.base.errors import CloudError, ErrorClass
from dropforge.base.settings import Settings
from dropforge.cloud import kubernetes
from dropforge.cloud.resource import Resource
from dropforge.platforms.gke.requests import cluster_of
from dropforge.platforms.gke.train import JOB, GkeJobs
from dropforge.platforms.ray.train import RayJobs
from dropforge.platforms.training import Launch, Phase, Waits
from dropforge.spec import parse_spec
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Emulator
from dropforge_local.containers.images import ImageStore
from dropforge_local.containers.processes import end_all
from dropforge_local.emulators.compute import ComputeConfig, ComputeEmulator
from dropforge_local.emulators.container import GkeConfig, GkeEmulator
from dropforge_local.emulators.kit.host import Host
from dropforge_local.emulators.kubernetes import KubernetesConfig, KubernetesEmulator

from ...deployments import Bound, clients, present, settings_with
from ..shared import Stages, contains, forget_clients, switch_faults, write_trainer

# The first word of the run id says how the container behaves.
MAIN_PY = """
    import os, signal, sys, time
    behaviour = os.environ["DROPFORGE_RUN"].split("-")[0]
    code = 75 if behaviour == "polite" else 143
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    if behaviour == "rank":  # the first machine fails, and this failure ends the other machines
        time.sleep(0.5 * int(os.environ["JOB_COMPLETION_INDEX"]))
        sys.exit(65 if os.environ["JOB_COMPLETION_INDEX"] == "0" else 70)
    if behaviour.startswith("exit"):
        sys.exit(int(behaviour.removeprefix("exit")))
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour != "succeed":
        time.sleep(600)
"""
IMAGE = "us-central1-docker.pkg.dev/p1/dropforge/train-x:v1"
SETTINGS = replace(
    settings_with(), project="p1", train_trl_image=IMAGE, gke_cluster="c1", job_events_topic="job-events"
)
SPOT = [{"region": "us-central1", "capacity": "spot"}]
STANDING = kubernetes.cluster_name("p1", "us-central1", "c1")
RARE = "nvidia-tesla-a100"  # unique to a test: leftover nodes of another test would bypass the faults
TARGET = Bound(GkeJobs(), SETTINGS)
STAGES = Stages(TARGET)


def launch(behave: str, settings: Settings = SETTINGS, timeout_seconds: int = 600, **target: Any) -> Launch:
    spec = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "owner/data"},
        "target": {"type": "gke", "placements": [{"region": "us-central1"}], **target},
        "serve": None,
    }
    run = f"{behave}-{uuid.uuid4().hex[:12]}"
    deadline = datetime.now(UTC) + timedelta(seconds=timeout_seconds)
    return Launch(run, 1, 0, parse_spec(json.dumps(spec).encode()), settings, deadline, timeout_seconds, key="")


@dataclass
class Cloud:
    """The emulators, their fault switches, and the actions of a user with kubectl."""

    url: str
    live: Callable[[], list[str]]

    def faults(self, emulator: str, **switches: Any) -> None:
        switch_faults(self.url, emulator, **switches)

    @property
    def api(self) -> kubernetes.Kubernetes:
        return kubernetes.connect(present(), kubernetes.find_cluster(present(), STANDING))

    def pod(self, attempt: Launch) -> str:
        """Return the attempt's first pod as namespace/name."""
        namespace = attempt.settings.kubernetes_namespace
        pods = self.api.find(namespace, "pods", labelSelector=f"dropforge-run={attempt.run}")
        return f"{namespace}/{pods[0]['metadata']['name']}"


def build(home: Path, emulators: list[Any]) -> Sequence[Emulator]:
    db, clock = Database(home / "state.db"), SystemClock()
    compute = ComputeEmulator(db, clock, directory=home / "disks", config=ComputeConfig(delete_seconds=0.05))
    api = KubernetesEmulator(
        Host(
            db,
            clock,
            ImageStore(home / "repo", home / "images", Path(sys.executable)),
            home / "containers",
            lambda account: {},
        ),
        authorize=lambda headers: headers.get("Authorization") == "Bearer good",
        config=KubernetesConfig(
            node_seconds=0.05,
            node_idle_seconds=0.5,
            job_backoff_seconds=0.05,
            pull_retry_seconds=0.1,
            preemption_grace_seconds=1.0,
            reservations=frozenset({"known"}),
        ),
        disks=compute.disks,
    )
    emulators.append(api)
    return [
        compute,
        api,
        GkeEmulator(db, clock, kubernetes=api, config=GkeConfig(create_seconds=0.2, delete_seconds=0.2)),
    ]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """Start a standing cluster for all tests, with the objects that Terraform creates in it."""
    home = tmp_path_factory.mktemp("gke")
    write_trainer(home, MAIN_PY)
    emulators: list[KubernetesEmulator] = []
    background = BackgroundServer(lambda: build(home, emulators))

    async def live() -> list[str]:
        return emulators[0].live()

    with background as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv("GKE_EMULATOR_HOST", server.url)
        environment.setenv("COMPUTE_EMULATOR_HOST", server.url)
        environment.setenv("DROPFORGE_EMULATOR_TOKEN", "good")
        forget_clients()
        parent, _, name = STANDING.rpartition("/clusters/")
        clients.gke().create_cluster(parent=parent, cluster={"name": name, "autopilot": {"enabled": True}})
        until(
            lambda: kubernetes.find_cluster(present(), STANDING),
            lambda cluster: cluster.status == container_v1.Cluster.Status.RUNNING,
        )
        cloud = Cloud(server.url, lambda: background.call(live()))
        account = {"name": SETTINGS.kubernetes_trainer_account, "namespace": SETTINGS.kubernetes_namespace}
        cloud.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": account["namespace"]}})
        cloud.api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
        yield cloud
        forget_clients()
    end_all(home / "containers", grace_seconds=0)


@pytest.fixture
def cloud(running: Cloud) -> Iterator[Cloud]:
    yield running
    running.faults("kubernetes", stockout=[], quota={}, fail_next=[])
    running.faults("container", stockout=[], quota={}, fail_next=[])


def test_an_attempt_from_its_request_to_the_deletion_of_its_resources(cloud: Cloud) -> None:
    attempt = launch("succeed")
    assert TARGET.provision(attempt) is None
    assert TARGET.provision(attempt) is None  # the reply was lost
    [job] = TARGET.resources(attempt)
    assert len(cloud.api.find("dropforge", "pods", labelSelector=f"dropforge-run={attempt.run}")) <= 1
    status = STAGES.ended(attempt)
    assert (status.phase, status.exit_code) == (Phase.SUCCEEDED, 0)
    stored = cloud.api.get(job.name)
    assert stored is not None
    assert contains(stored, job.request)
    STAGES.tear_down([job])
    assert TARGET.inspect(attempt).phase is Phase.GONE
    assert TARGET.teardown(JOB, job.name)
    assert not [name for name in cloud.live() if attempt.run in name]


@pytest.mark.parametrize(
    ("behave", "expected", "code"),
    [
        ("exit64", ErrorClass.CONFIG, 64),
        ("exit70", ErrorClass.CODE, 70),
        ("exit75", ErrorClass.PREEMPTED, 75),
        ("exit1", ErrorClass.CODE, 1),
        ("killed", ErrorClass.INFRASTRUCTURE, 137),
    ],
)
def test_the_exit_code_gives_the_phase_and_the_error_class(
    cloud: Cloud, behave: str, expected: ErrorClass, code: int
) -> None:
    attempt, before = launch(behave), datetime.now(UTC).replace(microsecond=0)  # Kubernetes notes full seconds
    STAGES.provision(attempt)
    status = STAGES.ended(attempt)
    assert (status.phase, status.error_class, status.exit_code) == (Phase.FAILED, expected, code)
    assert status.ended is not None
    assert before <= status.ended <= datetime.now(UTC)
    STAGES.tear_down(TARGET.resources(attempt))


def test_nodes_connect_by_name_and_the_first_failed_node_gives_the_reason(cloud: Cloud) -> None:
    attempt = launch("rank", nodes=2)
    policy, service, job = TARGET.resources(attempt)
    STAGES.provision(attempt)
    STAGES.provision(attempt)
    for resource in (policy, service):
        stored = cloud.api.get(resource.name)
        assert stored is not None
        assert contains(stored, resource.request)
    status = STAGES.ended(attempt)
    assert (status.error_class, status.exit_code) == (ErrorClass.DATA, 65)
    STAGES.tear_down([policy, service, job])
    assert not [name for name in cloud.live() if attempt.run in name]


def test_an_attempt_runs_only_when_all_its_pods_have_a_machine(cloud: Cloud) -> None:
    # No other test requests these GPUs: leftover nodes of another test would bypass the quota.
    cloud.faults("kubernetes", quota={"nvidia-tesla-t4": 1})
    attempt = launch("sleep", nodes=2, accelerator="nvidia-tesla-t4")
    STAGES.provision(attempt)
    status = until(lambda: TARGET.inspect(attempt), lambda status: status.error_class is ErrorClass.QUOTA)
    assert status.phase is Phase.PENDING
    cloud.faults("kubernetes", quota={})
    STAGES.wait_for(attempt, Phase.RUNNING)
    STAGES.tear_down(TARGET.resources(attempt))


def test_an_attempts_own_cluster_is_created_and_deleted(cloud: Cloud) -> None:
    attempt = launch("succeed", cluster={"create": True})
    assert TARGET.provision(attempt) == Waits(f"{cluster_of(attempt)} is being created")
    assert TARGET.provision(attempt)  # GKE still creates the cluster; the second call creates no other cluster
    STAGES.provision(attempt)
    cluster, job = TARGET.resources(attempt)
    created = kubernetes.find_cluster(present(), cluster.name)
    assert created.autopilot.enabled
    assert created.resource_labels["dropforge-run"] == attempt.run
    account = kubernetes.connect(present(), created).get(
        f"{cluster.name}/k8s/namespaces/dropforge/serviceaccounts/dropforge-trainer"
    )
    assert account is not None
    assert account["metadata"]["annotations"]["iam.gke.io/gcp-service-account"] == SETTINGS.trainer_service_account
    assert [resource.name for resource in TARGET.listed(SETTINGS) if resource.run == attempt.run] == [cluster.name]
    assert STAGES.ended(attempt).phase is Phase.SUCCEEDED
    # IAM lets only the functions that train read Jobs in an attempt's own cluster (terraform/permissions.yaml).
    cloud.faults("kubernetes", fail_next={"verb": "get", "resource": "jobs", "code": 403})
    assert not TARGET.teardown(job.kind, job.name)
    cloud.faults("kubernetes", fail_next=[])
    STAGES.tear_down([cluster, job])
    assert kubernetes.find_cluster(present(), cluster.name) is None
    assert TARGET.inspect(attempt).phase is Phase.GONE


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_crash_between_cluster_and_job_leaves_no_resource(cloud: Cloud, calls: int) -> None:
    """The ledger has both entries before either resource is created; a resource never created counts as gone."""
    attempt = launch("sleep", cluster={"create": True})
    for _ in range(calls):
        TARGET.provision(attempt)
    STAGES.tear_down(list(reversed(TARGET.resources(attempt))))
    assert not [name for name in cloud.live() if attempt.run in name]
    assert kubernetes.find_cluster(present(), TARGET.resources(attempt)[0].name) is None


def test_jobs_services_clusters_and_pods_that_have_lost_their_job_are_listed(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "PAGE", 1)
    attempt, other = launch("sleep", nodes=2), launch("sleep", cluster={"create": True})
    STAGES.provision(attempt)
    until(lambda: TARGET.inspect(attempt), lambda status: status.phase is Phase.RUNNING)
    TARGET.provision(other)
    listed = {
        resource.name: resource for resource in TARGET.listed(SETTINGS) if resource.run in (attempt.run, other.run)
    }
    expected = [*TARGET.resources(attempt), TARGET.resources(other)[0]]  # pods are not listed while their Job exists
    assert {(resource.kind, resource.name) for resource in listed.values()} == {
        (resource.kind, resource.name) for resource in expected
    }
    assert {resource.attempt for resource in listed.values()} == {1}
    assert all(
        resource.created and abs((datetime.now(UTC) - resource.created).total_seconds()) < 60
        for resource in listed.values()
    )
    assert list(Bound(RayJobs()).listed(SETTINGS)) == []

    policy, service, job, _ = expected
    path = f"/apis/batch/v1/namespaces/{SETTINGS.kubernetes_namespace}/jobs/{job.name.rpartition('/')[2]}"
    cloud.api._call("DELETE", path, body={"propagationPolicy": "Orphan"})
    until(lambda: cloud.api.get(job.name), lambda stored: stored is None)
    pods = [
        resource
        for resource in TARGET.listed(SETTINGS)
        if resource.run == attempt.run and resource.kind == "k8s.io/Pod"
    ]
    assert len(pods) == 2
    STAGES.tear_down(
        [
            *(Resource(resource.kind, resource.name) for resource in pods),
            policy,
            service,
            *reversed(TARGET.resources(other)),
        ]
    )
    assert not [resource for resource in TARGET.listed(SETTINGS) if resource.run in (attempt.run, other.run)]


@pytest.mark.parametrize("code", [500, 503, 429, 409])
def test_after_a_lost_reply_nothing_is_created_twice(cloud: Cloud, code: int) -> None:
    cloud.faults("kubernetes", fail_next={"verb": "create", "resource": "jobs", "code": code, "after_effect": True})
    attempt = launch("sleep")
    if code == 409:  # the answer is correct: the job exists
        assert TARGET.provision(attempt) is None
    else:
        with pytest.raises(CloudError) as failure:
            TARGET.provision(attempt)
        assert failure.value.error_class is ErrorClass.TRANSIENT
        assert TARGET.provision(attempt) is None
    STAGES.wait_for(attempt, Phase.RUNNING)
    STAGES.tear_down(TARGET.resources(attempt))


def test_after_a_lost_reply_of_gke_no_second_cluster_is_created(cloud: Cloud) -> None:
    cloud.faults("container", fail_next={"method": "create_cluster", "status": "UNAVAILABLE", "after_effect": True})
    attempt = launch("sleep", cluster={"create": True})
    with pytest.raises(CloudError) as failure:
        TARGET.provision(attempt)
    assert failure.value.error_class is ErrorClass.TRANSIENT
    STAGES.provision(attempt)
    STAGES.tear_down(TARGET.resources(attempt))


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (401, "Unauthorized", ErrorClass.PERMISSION),
        (403, 'jobs.batch is forbidden: User "x" cannot create resource "jobs"', ErrorClass.PERMISSION),
        (403, 'jobs.batch "j" is forbidden: exceeded quota: gpus, requested: 1, used: 8, limited: 8', ErrorClass.QUOTA),
        (400, 'admission webhook "warden-validating" denied the request', ErrorClass.CONFIG),
        (422, "Job.batch is invalid: spec.template", ErrorClass.CONFIG),
        (404, 'namespaces "dropforge" not found', ErrorClass.CONFIG),
        (429, "too many requests, please try again later", ErrorClass.TRANSIENT),
        (500, "etcdserver: request timed out", ErrorClass.TRANSIENT),
        (503, "the server is currently unable to handle the request", ErrorClass.TRANSIENT),
    ],
)
def test_a_refusal_of_the_kubernetes_api_has_its_class(
    cloud: Cloud, code: int, message: str, expected: ErrorClass
) -> None:
    rule = {"verb": "create", "resource": "jobs", "code": code, "message": message, "retry_after": 60}
    cloud.faults("kubernetes", fail_next=rule)
    with pytest.raises(CloudError, match=message[:20]) as failure:
        TARGET.provision(launch("sleep"))
    assert (failure.value.error_class, bool(failure.value.hint)) == (expected, True)


def test_a_slow_api_is_a_transient_error_after_the_timeout(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "TIMEOUT_SECONDS", 0.2)
    cloud.faults("kubernetes", fail_next={"verb": "get", "resource": "jobs", "count": 2, "delay_seconds": 1})
    attempt = launch("sleep")
    with pytest.raises(CloudError) as failure:  # without the timeout, the answer would come
        TARGET.inspect(attempt)
    assert failure.value.error_class is ErrorClass.TRANSIENT


class Credentials:
    """Google credentials whose expiry the test sets."""

    valid = False
    token = ""
    refreshed = 0

    def refresh(self, request: Any) -> None:
        self.valid, self.token = True, "good"
        self.refreshed += 1


def test_a_token_is_renewed_when_it_expires_and_only_then(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, credentials = launch("sleep"), Credentials()
    monkeypatch.delenv("DROPFORGE_EMULATOR_TOKEN")
    monkeypatch.setattr(google.auth, "default", lambda scopes: (credentials, "p1"))
    forget_clients()
    for refreshed in (1, 1):
        assert TARGET.inspect(attempt).phase is Phase.GONE
        assert credentials.refreshed == refreshed
    credentials.valid, credentials.token = False, "expired"
    assert TARGET.inspect(attempt).phase is Phase.GONE
    assert credentials.refreshed == 2
    forget_clients()


def test_the_error_for_an_unknown_token_names_the_missing_role(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = launch("sleep")
    monkeypatch.setenv("DROPFORGE_EMULATOR_TOKEN", "expired")
    forget_clients()
    with pytest.raises(CloudError) as failure:
        TARGET.provision(attempt)
    assert (failure.value.error_class, failure.value.message) == (ErrorClass.PERMISSION, "Unauthorized")
    assert "roles/container.developer" in failure.value.hint
    monkeypatch.setenv("DROPFORGE_EMULATOR_TOKEN", "good")
    forget_clients()
    assert TARGET.inspect(attempt).phase is Phase.GONE


@pytest.mark.parametrize(
    ("faults", "placement", "expected", "phase"),
    [
        ({"stockout": [RARE]}, {}, ErrorClass.STOCKOUT, Phase.PENDING),
        ({"quota": {RARE: 0}}, {}, ErrorClass.QUOTA, Phase.PENDING),
        ({}, {"capacity": "reservation", "reservation": "unknown"}, ErrorClass.CONFIG, Phase.FAILED),
    ],
)
def test_the_status_of_a_pod_without_a_machine_has_the_reason(
    cloud: Cloud, faults: dict[str, Any], placement: dict[str, str], expected: ErrorClass, phase: Phase
) -> None:
    cloud.faults("kubernetes", **faults)
    attempt = launch("sleep", accelerator=RARE, placements=[{"region": "us-central1", **placement}])
    STAGES.provision(attempt)
    status = until(lambda: TARGET.inspect(attempt), lambda status: status.error_class is expected)
    assert status.phase is phase
    assert status.message
    STAGES.tear_down(TARGET.resources(attempt))


def test_a_known_reservation_and_spot_are_scheduled(cloud: Cloud) -> None:
    placements = [{"region": "us-central1", "capacity": "reservation", "reservation": "known"}]
    for attempt in (launch("sleep", placements=placements), launch("sleep", placements=SPOT)):
        STAGES.provision(attempt)
        STAGES.wait_for(attempt, Phase.RUNNING)
        STAGES.tear_down(TARGET.resources(attempt))


def test_a_missing_image_is_a_config_error(cloud: Cloud) -> None:
    attempt = launch(
        "sleep", settings=replace(SETTINGS, train_trl_image=f"{IMAGE}-missing".replace("train-x", "missing"))
    )
    STAGES.provision(attempt)
    status = STAGES.ended(attempt)
    assert (status.error_class, status.exit_code) == (ErrorClass.CONFIG, None)
    assert attempt.settings.train_trl_image in status.message
    STAGES.tear_down(TARGET.resources(attempt))


def test_a_missing_service_account_is_a_config_error(cloud: Cloud) -> None:
    attempt = launch("sleep", settings=replace(SETTINGS, kubernetes_trainer_account="missing"))
    STAGES.provision(attempt)
    status = STAGES.ended(attempt)
    assert (status.phase, status.error_class) == (Phase.FAILED, ErrorClass.CONFIG)
    assert 'serviceaccount "missing" not found' in status.message
    STAGES.tear_down(TARGET.resources(attempt))


def test_a_preempted_node_is_distinguished_from_a_failure(cloud: Cloud) -> None:
    attempt = launch("polite", placements=SPOT)
    STAGES.provision(attempt)
    STAGES.wait_for(attempt, Phase.RUNNING)
    pod = cloud.pod(attempt)
    until(lambda: cloud.api.get(f"{STANDING}/k8s/namespaces/{pod.replace('/', '/pods/')}"), is_running)
    cloud.faults("kubernetes", preempt={"pod": pod})
    status = STAGES.ended(attempt)
    assert (status.phase, status.error_class) == (Phase.FAILED, ErrorClass.PREEMPTED)
    STAGES.tear_down(TARGET.resources(attempt))


def is_running(pod: Any) -> bool:
    return bool(pod["status"]["phase"] == "Running")


def test_an_evicted_pod_is_reported_as_out_of_memory(cloud: Cloud) -> None:
    attempt = launch("sleep")
    STAGES.provision(attempt)
    STAGES.wait_for(attempt, Phase.RUNNING)
    cloud.faults("kubernetes", evict={"pod": cloud.pod(attempt)})
    status = STAGES.ended(attempt)
    assert (status.phase, status.error_class) == (Phase.FAILED, ErrorClass.OUT_OF_MEMORY)
    assert "low on resource: memory" in status.message
    STAGES.tear_down(TARGET.resources(attempt))


def test_the_job_itself_enforces_the_deadline(cloud: Cloud) -> None:
    attempt = launch("sleep", timeout_seconds=1)
    STAGES.provision(attempt)
    assert STAGES.ended(attempt).error_class is ErrorClass.DEADLINE
    STAGES.tear_down(TARGET.resources(attempt))


def test_a_job_deleted_by_a_user_is_gone_and_its_orphaned_pods_are_deleted(cloud: Cloud) -> None:
    attempt = launch("sleep")
    STAGES.provision(attempt)
    STAGES.wait_for(attempt, Phase.RUNNING)
    [job] = TARGET.resources(attempt)
    path = f"/apis/batch/v1/namespaces/dropforge/jobs/{job.name.rpartition('/')[2]}"
    cloud.api._call("DELETE", path, body={"propagationPolicy": "Orphan"})
    assert TARGET.inspect(attempt).phase is Phase.GONE
    assert cloud.pod(attempt)
    STAGES.tear_down([job])
    assert not [name for name in cloud.live() if attempt.run in name]


def test_a_cluster_deleted_by_a_user_is_gone(cloud: Cloud) -> None:
    attempt = launch("sleep", cluster={"create": True})
    STAGES.provision(attempt)
    cluster, job = TARGET.resources(attempt)
    clients.gke().delete_cluster(name=cluster.name)
    assert TARGET.inspect(attempt).phase is Phase.GONE
    with pytest.raises(CloudError, match="STOPPING") as failure:
        TARGET.provision(attempt)
    assert failure.value.error_class is ErrorClass.INFRASTRUCTURE
    STAGES.tear_down([job, cluster])
    assert TARGET.inspect(attempt).phase is Phase.GONE


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({"quota": {"us-central1": 0}}, ErrorClass.QUOTA),
        ({"stockout": ["us-central1"]}, ErrorClass.STOCKOUT),
        ({"fail_next": {"method": "create_cluster", "status": "PERMISSION_DENIED"}}, ErrorClass.PERMISSION),
        ({"fail_next": {"method": "get_cluster", "status": "PERMISSION_DENIED"}}, ErrorClass.PERMISSION),
        ({"fail_next": {"method": "create_cluster", "status": "UNAVAILABLE"}}, ErrorClass.TRANSIENT),
    ],
)
def test_a_cluster_that_cannot_be_created_has_its_error_class(
    cloud: Cloud, faults: dict[str, Any], expected: ErrorClass
) -> None:
    cloud.faults("container", **faults)
    attempt = launch("sleep", cluster={"create": True})
    with pytest.raises(CloudError) as failure:
        STAGES.provision(attempt)
    assert (failure.value.error_class, bool(failure.value.hint)) == (expected, True)
    STAGES.tear_down(TARGET.resources(attempt))


def test_a_standing_cluster_that_does_not_exist_is_refused(cloud: Cloud) -> None:
    attempt = launch("sleep", cluster={"name": "absent"})
    with pytest.raises(CloudError, match="clusters/absent does not exist") as failure:
        TARGET.provision(attempt)
    assert failure.value.error_class is ErrorClass.CONFIG
    assert TARGET.inspect(attempt).phase is Phase.GONE
    STAGES.tear_down(TARGET.resources(attempt))


def test_a_cluster_of_another_run_is_not_used(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = launch("sleep", cluster={"create": True})
    STAGES.provision(attempt)
    own = kubernetes.find_cluster(present(), TARGET.resources(attempt)[0].name)
    with monkeypatch.context() as patch:
        foreign = SimpleNamespace(resource_labels={"dropforge-run": "other"}, status=own.status)
        patch.setattr(kubernetes, "find_cluster", lambda *_: foreign)
        with pytest.raises(CloudError, match="belongs to") as failure:
            TARGET.provision(attempt)
    assert failure.value.error_class is ErrorClass.CONFIG
    STAGES.tear_down(TARGET.resources(attempt))


def test_resources_of_another_run_are_not_touched(cloud: Cloud) -> None:
    attempt = launch("sleep")
    [job] = TARGET.resources(attempt)
    unowned_job = {**job.request, "metadata": {**job.request["metadata"], "labels": {"dropforge-run": "other"}}}
    assert cloud.api.create(unowned_job)
    with pytest.raises(CloudError, match="belongs to") as failure:
        TARGET.provision(attempt)
    assert failure.value.error_class is ErrorClass.CONFIG
    STAGES.tear_down([job])
