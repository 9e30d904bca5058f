"""RayJobs: real Ray in the pods, the real Jobs API, KubeRay's states. A cluster takes 20 s, so each test does much.

What tests/stack runs in Ray's place (tests/images/containers/ray_noop) is held here to the same.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import textwrap
import time
import urllib.error
import urllib.request
import uuid
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kubernetes.client import exceptions

from dropforge_local.containers.processes import end_all, find_members

from .conftest import CONFIG, NAME, REGISTRY, Kube, Stack

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = ROOT / "build" / "maxtext"
RAY = ENVIRONMENT / "bin" / "ray"
REAL, NOOP, NO_WGET = "train-ray-test", "ray-noop", "ray-without-wget"
WITH_RAY = pytest.param(REAL, marks=pytest.mark.engines)
TPU = "google.com/tpu"
WAIT_SECONDS = 600.0
# What a client of Ray says whose server did not start, or ended at its start (psutil: a race of Ray's).
CLIENT_NOT_SERVED = ("Starting Ray client server failed", "psutil.ZombieProcess", "psutil.NoSuchProcess")

DRIVER = """
    import os, sys, time
    mode = sys.argv[1]
    print("driver", mode, "of", os.environ["RAY_CLUSTER_NAME"], flush=True)
    if mode == "exit":
        sys.exit(int(sys.argv[2]))
    if mode == "sleep":
        time.sleep(float(sys.argv[2]))
    if mode == "hosts":
        import ray
        @ray.remote(num_cpus=1, resources={"TPU": 4})
        class Host:
            def who(self):
                return [os.environ[name] for name in ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_NAME")]
        ray.init(log_to_driver=False)
        hosts = [Host.remote() for _ in range(2)]
        print("hosts", sorted(ray.get([host.who.remote() for host in hosts])), flush=True)
"""
DOCKERFILE = """
FROM python:3.12-slim
RUN apt-get install wget
WORKDIR /app
COPY containers/train_ray_test/driver.py /app/driver.py
LABEL dev.dropforge.environments="/opt/maxtext=maxtext"
ENV PATH=/opt/maxtext/bin:/usr/bin:/bin
ENTRYPOINT ["python", "driver.py"]
"""
NOOP_DOCKERFILE = """
FROM python:3.11-slim
RUN apt-get install wget
WORKDIR /app
COPY containers/ray_noop/ray.py /app/bin/ray
COPY containers/train_ray_test/driver.py /app/driver.py
ENV PATH=/app/bin:/usr/bin:/bin
ENTRYPOINT ["python", "driver.py"]
"""

needs_wget = pytest.mark.skipif(shutil.which("wget") is None, reason="this machine has no wget")
pytestmark = pytest.mark.timeout(1800)  # the first may have to make Ray's environment


def write_ray_image(repo: Path) -> None:
    folder = repo / "containers" / "train_ray_test"
    folder.mkdir(parents=True)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    (folder / "driver.py").write_text(textwrap.dedent(DRIVER))
    shutil.copytree(ROOT / "tests" / "images" / "containers" / "ray_noop", repo / "containers" / "ray_noop")
    (repo / "containers" / "ray_noop" / "Dockerfile").write_text(NOOP_DOCKERFILE)
    bare = repo / "containers" / "ray_without_wget"
    bare.mkdir()
    (bare / "Dockerfile").write_text(NOOP_DOCKERFILE.replace("RUN apt-get install wget\n", ""))
    (repo / "build").mkdir()
    (repo / "build" / "maxtext").symlink_to(ENVIRONMENT)


def ray_job(name: str, *words: str, hosts: int = 0, image: str = REAL, **spec: Any) -> dict[str, Any]:
    container = {"name": "ray", "image": f"{REGISTRY}/{image}:v1"}
    head = {**container, "resources": {"limits": {"cpu": "1", "memory": "8Gi"}}}
    worker = {**container, "resources": {"limits": {"cpu": "1", "memory": "8Gi", TPU: "4"}}}
    selector = {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice", "cloud.google.com/gke-tpu-topology": "2x4"}
    short = {"terminationGracePeriodSeconds": 3}
    group = {
        "groupName": "slice",
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": 1,
        "numOfHosts": hosts,
        "template": {"spec": {**short, "containers": [worker], "nodeSelector": selector}},
    }
    cluster: dict[str, Any] = {
        "rayVersion": "2.60.0",
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {}, "template": {"spec": {**short, "containers": [head]}}},
        "workerGroupSpecs": [group] if hosts else [],
    }
    base = {
        "entrypoint": " ".join(["python", "driver.py", *words]),
        "submissionMode": "HTTPMode",
        "shutdownAfterJobFinishes": True,
        "backoffLimit": 0,
        "rayClusterSpec": cluster,
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": {**base, **spec}}


class Ray:
    """RayJobs of a cluster's default namespace."""

    def __init__(self, kube: Kube, image: str = REAL) -> None:
        self.kube = kube
        self.image = image
        self.where = ("ray.io", "v1", kube.namespace)

    def create(self, *words: str, **more: Any) -> str:
        name = f"j{uuid.uuid4().hex[:6]}"
        self.kube.custom.create_namespaced_custom_object(
            *self.where, "rayjobs", ray_job(name, *words, image=self.image, **more)
        )
        return name

    def status(self, name: str) -> dict[str, Any]:
        job = self.kube.custom.get_namespaced_custom_object(*self.where, "rayjobs", name)
        return dict(job.get("status", {}))

    def states(self, name: str) -> tuple[str, str]:
        status = self.status(name)
        return status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")

    def pods(self) -> list[Any]:
        return [pod for pod in self.kube.pods() if "ray.io/cluster" in (pod.metadata.labels or {})]

    def clusters(self) -> list[Any]:
        return list(self.kube.custom.list_namespaced_custom_object(*self.where, "rayclusters")["items"])

    def patch(self, name: str, **spec: Any) -> None:
        self.kube.custom.patch_namespaced_custom_object(*self.where, "rayjobs", name, {"spec": spec})

    def delete(self, name: str) -> None:
        self.kube.custom.delete_namespaced_custom_object(*self.where, "rayjobs", name)

    def call(self, name: str, method: str, path: str = "", body: Any = None, token: str = "") -> tuple[int, bytes]:
        """Send a request to the Jobs API of a job's cluster; return status and answer."""
        headers = {"Authorization": f"Bearer {token or self.environment(name)['RAY_AUTH_TOKEN']}"}
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.address(name)}/api/jobs/{path}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, data, headers | {"Content-Type": "application/json"}, method=method),
                timeout=20,
            ) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def address(self, name: str, port: str = "8265") -> str:
        """The URL of a port of the head of a job's cluster; the default is the dashboard's."""
        head = f"{self.status(name)['rayClusterName']}-head-svc"
        service = self.kube.core.read_namespaced_service(head, self.kube.namespace)
        return str(json.loads(service.metadata.annotations["local.dropforge/urls"])[port])

    def environment(self, name: str) -> dict[str, str]:
        """The environment that the ray command line needs to reach a job's cluster from outside."""
        cluster = self.status(name)["rayClusterName"]
        secret = self.kube.core.read_namespaced_secret(cluster, self.kube.namespace)
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.kube.directory),
            "RAY_ADDRESS": self.address(name),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": b64decode(secret.data["auth_token"]).decode(),
        }


def until(read: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := read()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)
    return value


@pytest.fixture(params=[WITH_RAY])
def image(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kuberay() -> str:
    """The version of the Ray operator; the newest unless a test asks for another."""
    return CONFIG.kuberay


@pytest.fixture
def ray(image: str, kuberay: str, stack: Stack, request: pytest.FixtureRequest) -> Iterator[Ray]:
    if image == REAL:
        request.getfixturevalue("maxtext_environment")
    write_ray_image(stack.home / "repo")
    stack.kuberay = kuberay
    yield Ray(stack.start(), image)
    stack.kill()  # else it starts ended containers again
    # Whatever the test has left: no process of a Ray cluster outlives its containers.
    end_all(stack.home / "containers", grace_seconds=0)
    assert not find_members(stack.home / "containers")


@pytest.mark.slow
def test_a_job_runs_on_all_hosts_of_a_slice_and_takes_its_cluster_with_it(ray: Ray, stack: Stack) -> None:
    name = ray.create("hosts", hosts=2, ttlSecondsAfterFinished=600)
    until(lambda: len(ray.pods()) == 3)
    stack.kill()  # the cluster starts meanwhile
    ray = Ray(stack.start())
    until(lambda: ray.states(name) == ("Complete", "SUCCEEDED"))
    status = ray.status(name)
    assert (status["succeeded"], status["failed"], status["message"]) == (1, 0, "Job finished successfully.")
    assert status["dashboardURL"] == f"{status['rayClusterName']}-head-svc.default.svc.cluster.local:8265"

    environment = ray.environment(name)
    command = [str(RAY), "job", "logs", status["jobId"]]
    logs = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    names = "slice-0-0.{0}-headless,slice-0-1.{0}-headless".format(status["rayClusterName"])
    local = "127.0.0.1,127.0.0.1"
    assert any(
        f"hosts [['0', '{address}', 'slice-0'], ['1', '{address}', 'slice-0']]" in logs for address in (names, local)
    )
    assert ray.call(name, "GET", f"{status['jobId']}/logs", token="x" * 32)[0] in (401, 403)

    assert {pod.metadata.labels["ray.io/node-type"] for pod in ray.pods()} == {"head", "worker"}
    head = next(pod for pod in ray.pods() if pod.metadata.labels["ray.io/node-type"] == "head")
    assert "Ray runtime started" in ray.kube.core.read_namespaced_pod_log(head.metadata.name, "default")
    gcs = ray.address(name, "6379").removeprefix("http://")
    assert "headgroup" in from_outside(ray, name, str(RAY), "status", "--address", gcs)
    code = "import ray, sys; ray.init(sys.argv[1]); print('size', ray.cluster_resources()['TPU'])"
    client = ray.address(name, "10001").replace("http", "ray")
    assert "size 8.0" in from_outside(ray, name, str(ENVIRONMENT / "bin" / "python"), "-c", code, client)
    assert_only_loopback(stack.home / "containers")

    ray.patch(name, ttlSecondsAfterFinished=0)
    until(lambda: not ray.pods() and not ray.clusters())
    assert ray.states(name) == ("Complete", "SUCCEEDED")
    until(lambda: not find_members(stack.home / "containers"))


def from_outside(ray: Ray, name: str, *command: str) -> str:
    """Return the output of a client of Ray that keeps 127.0.0.1: by default, Ray takes this machine's address."""
    environment = {**ray.environment(name), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    del environment["RAY_ADDRESS"]
    for _ in range(3):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS)
        if not any(words in done.stderr for words in CLIENT_NOT_SERVED):
            break  # Ray gives its server 30 s to start, which a busy machine may need more than once
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("image", [WITH_RAY, NOOP])  # Ray, and the replacement that other tests use
def test_failed_driver_killed_head_and_stopped_job(ray: Ray) -> None:
    if ray.image == NOOP:  # a cluster of Ray takes 20 s: its failed driver is in the test of the older operators
        name = ray.create("exit", "65")
        assert_driver_failed(ray, name)
        until(lambda: not ray.pods())

    name = ray.create("sleep", "600")
    until(lambda: ray.states(name) == ("Running", "RUNNING"))
    before = head_processes(ray)
    for process in before:
        process.kill()
    # The pod starts its container again, with a Ray that knows of no job: the operator submits it once more.
    head = ray.pods()[0].metadata.name
    until(lambda: ray.kube.core.read_namespaced_pod(head, "default").status.container_statuses[0].restart_count == 1)
    until(lambda: ray.states(name) == ("Running", "RUNNING") and driver_count(ray) == 1)
    until(lambda: ray.kube.core.read_namespaced_pod(head, "default").status.container_statuses[0].ready)
    submitted = {"entrypoint": "python driver.py exit 0", "submission_id": ray.status(name)["jobId"]}
    assert ray.call(name, "POST", body=submitted)[0] == 500  # there is a job of that name: none runs twice
    assert driver_count(ray) == 1
    assert ray.call(name, "GET", "another")[0] == 404
    assert ray.call(name, "GET", submitted["submission_id"], token="x" * 32)[0] in (401, 403)
    # Somebody stops it by hand.
    code, answer = ray.call(name, "POST", f"{submitted['submission_id']}/stop")
    assert (code, json.loads(answer)) == (200, {"stopped": True})
    until(lambda: ray.states(name) == ("Complete", "STOPPED"))
    until(lambda: not ray.pods() and not ray.clusters())
    ray.delete(name)
    until(lambda: is_deleted(ray, name))
    until(lambda: not find_members(ray.kube.directory))  # a shim ends after its pod


def assert_driver_failed(ray: Ray, name: str) -> None:
    """Wait for the end of a job whose driver ends with 65."""
    until(lambda: ray.states(name) == ("Failed", "FAILED"))
    status = ray.status(name)
    assert (status["reason"], status["failed"]) == ("AppFailed", 1)
    assert "Job entrypoint command failed with exit code 65, last available logs" in status["message"]
    assert "driver exit of" in status["message"]


@pytest.mark.slow
@needs_wget
@pytest.mark.parametrize(
    ("kuberay", "image", "code"),
    [
        pytest.param("1.4", REAL, "65", marks=pytest.mark.engines),
        ("1.4", NOOP, "0"),
        ("1.5", NOOP, "0"),
        ("1.6", NOOP, "0"),
    ],
)
def test_older_operators_run_a_job_too(ray: Ray, kuberay: str, code: str) -> None:
    """The test of a whole slice above runs under the newest. 1.4 drops authOptions, so its Ray demands no token."""
    name = ray.create("exit", code, hosts=1, ttlSecondsAfterFinished=600)
    if code == "65":
        assert_driver_failed(ray, name)
    else:
        until(lambda: ray.states(name) == ("Complete", "SUCCEEDED"))
    pods = ray.pods()
    assert {pod.metadata.labels["ray.io/node-type"] for pod in pods} == {"head", "worker"}
    for pod in pods:
        (container,), (status,) = pod.spec.containers, pod.status.container_statuses
        assert status.ready
        assert (container.readiness_probe.http_get is None) is (kuberay in ("1.4", "1.5"))
    job = ray.kube.custom.get_namespaced_custom_object(*ray.where, "rayjobs", name)
    cluster = ray.status(name)["rayClusterName"]
    secrets = [item.metadata.name for item in ray.kube.core.list_namespaced_secret(ray.kube.namespace).items]
    assert ("authOptions" in job["spec"]["rayClusterSpec"], cluster in secrets) == (kuberay != "1.4",) * 2
    answer = ray.call(name, "GET", ray.status(name)["jobId"], token="x" * 32)[0]
    assert answer in ((200,) if kuberay == "1.4" else (401, 403))
    ray.patch(name, ttlSecondsAfterFinished=0)
    until(lambda: not ray.pods() and not ray.clusters())


@needs_wget
@pytest.mark.parametrize(("kuberay", "image"), [("1.5", NO_WGET)])
def test_without_wget_in_the_image_an_older_operator_never_submits_the_job(ray: Ray) -> None:
    name = ray.create("exit", "0")
    until(lambda: any("wget: command not found" in message for _, message in ray.kube.events()))
    assert ray.states(name) == ("Initializing", "")
    (head,) = ray.pods()
    assert head.status.phase == "Running"
    assert not head.status.container_statuses[0].ready


@pytest.mark.parametrize(("kuberay", "image"), [("1.5", NOOP)])
def test_an_operator_before_1_6_replaces_one_host_of_a_slice(ray: Ray) -> None:
    name = ray.create("sleep", "600", hosts=2)
    until(lambda: ray.states(name) == ("Running", "RUNNING"))
    hosts = {pod.metadata.uid: pod.metadata.name for pod in ray.pods() if "worker" in pod.metadata.name}
    kept, lost = sorted(hosts.items())
    ray.kube.core.delete_namespaced_pod(lost[1], ray.kube.namespace)
    until(lambda: len({p.metadata.uid for p in ray.pods() if "worker" in p.metadata.name} - {lost[0]}) == 2)
    assert kept[0] in {pod.metadata.uid for pod in ray.pods()}


@pytest.mark.parametrize("kuberay", ["1.4"])
@pytest.mark.parametrize("image", [NOOP])
def test_an_old_operator_refuses_a_job_with_an_event_only(ray: Ray) -> None:
    name = ray.create("x", activeDeadlineSeconds=0)
    until(lambda: any("InvalidRayJobSpec" in reason for reason, _ in ray.kube.events(name)))
    assert ray.states(name) == ("", "")


@pytest.mark.parametrize("image", [NOOP])  # the tests above have tested the start and the end of Ray itself
def test_suspending_ends_the_cluster_and_a_deadline_ends_the_job(ray: Ray) -> None:
    name = ray.create("sleep", "600", activeDeadlineSeconds=600)
    until(lambda: ray.states(name)[0] == "Running")
    ray.patch(name, suspend=True)
    until(lambda: ray.states(name)[0] == "Suspended")
    assert not ray.pods()
    assert "rayClusterName" not in ray.status(name)
    assert_late(ray, name)

    name = ray.create("sleep", "600")  # another deadline, of a job that runs
    until(lambda: ray.states(name) == ("Running", "RUNNING"))
    assert_late(ray, name)


def assert_late(ray: Ray, name: str) -> None:
    """A deadline one second after the job's start, or in the past, ends the job and its cluster."""
    ray.patch(name, suspend=False, activeDeadlineSeconds=1)
    until(lambda: ray.states(name)[0] == "Failed")
    assert ray.status(name)["reason"] == "DeadlineExceeded"
    until(lambda: not ray.pods())


def test_refusals_of_the_operator_are_in_the_status(ray: Ray) -> None:
    def refused(**spec: Any) -> str:
        name = ray.create("x", **spec)
        until(lambda: ray.states(name)[0] == "ValidationFailed")
        return str(ray.status(name)["message"])

    assert "shutdownAfterJobFinishes set to false" in refused(shutdownAfterJobFinishes=False, ttlSecondsAfterFinished=9)
    assert "activeDeadlineSeconds must be a positive integer" in refused(activeDeadlineSeconds=0)
    assert "one of RayClusterSpec or ClusterSelector" in refused(rayClusterSpec=None)
    odd = copy.deepcopy(ray_job("x", hosts=2)["spec"]["rayClusterSpec"])
    odd["workerGroupSpecs"][0]["minReplicas"] = 2
    assert "minReplicas 2 greater than maxReplicas 1" in refused(rayClusterSpec=odd)
    assert not ray.clusters()


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ({"submissionMode": "K8sJobMode"}, 501),
        ({"clusterSelector": {"ray.io/cluster": "c"}}, 501),
        ({"deletionStrategy": {"deletionRules": []}, "managedBy": "ray.io/kuberay-operator"}, 501),
        ({"activeDeadlineSeconds": "soon"}, 400),
        ({"rayClusterSpec": {"workerGroupSpecs": []}}, 422),
        ({"rayClusterSpec": {"headGroupSpec": {}, "authOptions": {"mode": "none"}}}, 422),
    ],
)
def test_refusals_of_the_api(kube: Kube, spec: dict[str, Any], code: int) -> None:
    path = f"/apis/ray.io/v1/namespaces/{kube.namespace}/rayjobs"
    assert kube.call("POST", path, ray_job("r", **spec))[0] == code


def is_deleted(ray: Ray, name: str) -> bool:
    try:
        ray.status(name)
    except exceptions.NotFoundException:
        return True
    return False


def head_processes(ray: Ray) -> list[psutil.Process]:
    """The exit state of the head's other processes."""
    name = "bin/ray" if ray.image == NOOP else "gcs_server"
    return [process for process in processes(ray) if name in " ".join(process.cmdline()[:2])]


def driver_count(ray: Ray) -> int:
    return sum(process.cmdline()[1:3] == ["driver.py", "sleep"] for process in processes(ray))


def processes(ray: Ray) -> Iterator[psutil.Process]:
    for pids in find_members(ray.kube.directory).values():
        for pid in pids:
            try:
                process = psutil.Process(pid)
                process.cmdline()
                yield process
            except psutil.Error:
                continue


def assert_only_loopback(directory: Path) -> None:
    """No process of a cluster listens where another machine could reach it."""
    listening = {
        connection.laddr.ip
        for pids in find_members(directory).values()
        for pid in pids
        if psutil.pid_exists(pid)
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, NAME
