"""The Ray container on a real Ray cluster of a head and two hosts, as the local stack starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.patience import TRAIN_SECONDS

from containers.common.errors import NOT_FOUND
from containers.train_maxtext.work import Work
from dropforge.run.artifacts import read_manifest, verify_manifest
from dropforge.spec import JobSpec
from dropforge_local import shims
from dropforge_local.base.recording import TRAINER
from dropforge_local.containers.images import ImageStore, Process

from .. import accounts
from ..maxtext import (
    PERIOD,
    QUICK_XLA,
    STEPS,
    Attempt,
    Driver,
    Uninterrupted,
    job_spec,
    wait_for_object,
    wait_for_step,
)
from ..names import ROOT, RUN_KEY, RUNS
from ..quick import Zygote

pytestmark = pytest.mark.slow

HOSTS, CHIPS = 2, 4
RUN = f"test-{uuid.uuid4().hex[:12]}"  # of all attempts: a machine's environment tells the run of its token
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
# One host and two hosts train the same batches; only the order of the sums differs.
LOSS_TOLERANCE = 1e-4


# The train stage, in which the second host is refused something while the first waits for it in a collective.
ONE_HOST_FAILS = """
import sys
from containers.common.attempt import exit_now
from containers.train_maxtext.stages import stage_main
from containers.train_ray import train as stage

train_on_host = stage.train_on_host

def fail_on_one_host(config):
    import jax
    from containers.train_maxtext import train as maxtext
    from google.api_core.exceptions import Forbidden
    from jax.experimental import multihost_utils

    def train(*_):
        multihost_utils.sync_global_devices("both hosts train")
        if jax.process_index() == 1:
            raise Forbidden("storage.objects.create was denied to host 1")
        multihost_utils.sync_global_devices("the second host never comes")

    maxtext.train = train
    train_on_host(config)

stage.train_on_host = fail_on_one_host
exit_now(stage_main("train", stage.run))
"""


class Cluster:
    """A Ray head and its hosts: processes of this machine, each in a session of its own."""

    def __init__(self, directory: Path, image: Process, zygote: Zygote) -> None:
        self.directory = directory  # short: Ray's sockets are below it, and the path of a socket has at most 107 bytes
        self.image = image
        self.token = uuid.uuid4().hex
        self.head = f"127.0.0.1:{free_port()}"
        self.zygote = zygote  # it forks Ray's programs and workers: 30 workers in this test, of which six train
        self.starts: list[Callable[[], subprocess.Popen[bytes]]] = []
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.agents: list[int] = []

    def start(self) -> None:
        self.add("--head", {6379: int(self.head.split(":")[1]), 8265: free_port(), 10001: free_port()})
        self.wait()
        for _ in range(HOSTS):
            self.add("--address=x", {}, "--resources=" + json.dumps({"TPU": CHIPS}))
            self.wait()  # one by one: together they start more slowly than a node waits

    def add(self, role: str, ports: dict[int, int], *words: str) -> None:
        agent = free_port()
        ports = {**ports, 52365: agent, 8080: free_port()}
        home = self.directory / f"n{len(self.nodes)}"
        home.mkdir()
        environment = {**self.environment(), **shims.ray_environment(self.environment(), ports, self.head)}
        environment = self.zygote.given(environment) | {"HOME": str(home), "TMPDIR": str(home)}
        ray = str(self.image.search_path[-1] / "ray")
        cpus = 0 if role == "--head" else 2
        command = [ray, "start", role, "--block", f"--num-cpus={cpus}", *words]

        def start() -> subprocess.Popen[bytes]:
            with (home / "log").open("ab") as log:
                return subprocess.Popen(
                    command, env=environment, stdout=log, stderr=log, cwd=self.image.workdir, start_new_session=True
                )

        self.starts.append(start)
        self.nodes.append(start())
        self.agents.append(agent)

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([*map(str, self.image.search_path), "/usr/bin", "/bin"])
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "OMP_NUM_THREADS": "1"}
        # Ray starts workers with niceness 15: beside another worker of pytest they would hardly train.
        own["RAY_worker_niceness"] = "0"
        own["RAY_enable_pipe_based_agent_to_parent_health_check"] = "1"  # the parent of a forked agent is the zygote
        return {**self.image.env, **QUICK_XLA, **own, "PATH": path}

    def wait(self) -> None:
        """Wait until all nodes answer. Restart a node that gave up (Ray does after 30 s), as Kubernetes does."""
        deadline = time.monotonic() + TRAIN_SECONDS
        for number, agent in enumerate(self.agents):
            while not healthy(agent):
                assert time.monotonic() < deadline, [node.poll() for node in self.nodes]
                if self.nodes[number].poll() is not None:
                    self.nodes[number] = self.starts[number]()
                time.sleep(0.5)

    def workers(self) -> list[psutil.Process]:
        """Ray Train's workers, one on each host."""
        return [process for process in self.processes() if is_worker(process)]

    def processes(self) -> list[psutil.Process]:
        processes = psutil.Process(self.zygote.pid).children(recursive=True)
        for node in self.nodes:
            with suppress(psutil.NoSuchProcess):
                processes += [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]
        return processes

    def listens_on(self) -> set[str]:
        """All addresses on which the cluster's processes listen: Ray, JAX and gloo."""
        addresses = set()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                connections = process.net_connections("inet")
                addresses |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
        return addresses

    def end(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for node in self.nodes:
            node.wait()


def is_worker(process: psutil.Process) -> bool:
    try:
        return any("RayTrainWorker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie
        return False


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/healthz", timeout=60) as answer:
            return b"raylet: success" in answer.read()
    except (OSError, urllib.error.URLError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(maxtext_zygote: Zygote, cloud: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("ray")
    image = ImageStore(ROOT, directory / "images", Path(sys.executable)).resolve("train-ray")
    at_account = cloud.environment(TRAINER)
    own = {name: value for name, value in at_account.items() if name != "PATH"}
    own |= accounts.container_environment(at_account["STORAGE_EMULATOR_HOST"], RUN)
    with tempfile.TemporaryDirectory(prefix="df-", ignore_cleanup_errors=True) as short:
        cluster = Cluster(Path(short), image.unpack(directory / "rootfs", env=own), maxtext_zygote)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()


@pytest.fixture
def driver(cloud: Any, cluster: Cluster, tmp_path: Path) -> Iterator[Driver]:
    ports: dict[int, int] = {}
    environment = {
        **cluster.environment(),
        **shims.ray_environment(cluster.environment(), ports, cluster.head),
        "HOME": str(tmp_path),
        "DROPFORGE_TPU_ACCELERATOR": "tpu-v6e-slice",
        "DROPFORGE_TPU_TOPOLOGY": "2x4",
        "DROPFORGE_TPU_HOSTS": str(HOSTS),
        "DROPFORGE_TPU_CHIPS_PER_HOST": str(CHIPS),
        "DROPFORGE_WORK_DIRECTORY": str(tmp_path / "work"),
    }
    environment = cluster.zygote.given(environment)
    driver = Driver(cloud, (cluster.image.argv[0], "ray_driver.py"), environment, cluster.image.workdir)
    yield driver
    driver.end()


@pytest.mark.timeout(5 * TRAIN_SECONDS)  # it waits for three trainings, one after the other
def test_two_hosts_killed_stopped_and_resumed_elsewhere_train_the_model_that_one_host_does(
    driver: Driver, cluster: Cluster, uninterrupted_maxtext: Uninterrupted, events: Any, series: Any, tmp_path: Path
) -> None:
    """A killed worker costs the steps since the last checkpoint; a stopped attempt costs no step.

    The machines' account may not touch the runs bucket, so every library must write there with the run's token.
    """
    alone = uninterrupted_maxtext.result
    rows = job_spec()["training"]["per_device_train_batch_size"]
    document = job_spec(training={"per_device_train_batch_size": rows // HOSTS})
    work, saved = tmp_path / "work" / RUN, f"checkpoints/{RUN}/maxtext/run/checkpoints"
    import_as(uninterrupted_maxtext, work, document)
    # Enough time to save a checkpoint on a machine that is busy with other tests.
    first = driver.start(document, RUN, DROPFORGE_GRACE_SECONDS="100")
    wait_for_object(driver.cloud, f"{saved}/{PERIOD}/commit_success.txt", first)
    cluster.workers()[-1].kill()
    resumed = wait_for_second_start(work / "progress.jsonl", first)
    assert resumed >= PERIOD
    assert resumed % PERIOD == 0
    wait_for_step(work / "progress.jsonl", resumed + 1, first)
    with ThreadPoolExecutor(1) as pool:
        addresses = pool.submit(cluster.listens_on)  # takes seconds on a busy machine, and training must not end first
        first.process.send_signal(signal.SIGTERM)
        assert addresses.result() <= LOOPBACK
    assert first.wait() == 75, first.output[-3000:] + logs_of(work)
    elsewhere = tmp_path / "elsewhere"
    second = driver.start(document, first.run, 2, DROPFORGE_WORK_DIRECTORY=str(elsewhere))
    code = second.wait()
    assert code == 0, second.output[-3000:] + logs_of(elsewhere / first.run)

    sent = events(first.run)
    (stopped,) = [event for event in sent if event.type == "preempted"]
    assert resumed < stopped.step < STEPS
    assert [event.resumed_step for event in sent if event.type == "started"] == [0, stopped.step]
    checkpoints = [event for event in sent if event.type == "checkpoint"]
    assert [event.step for event in checkpoints if event.attempt == 1][-1] == stopped.step
    assert checkpoints[-1].step == STEPS
    assert series(first.run, 2).step[-1] == STEPS
    assert sent[-1].type == "succeeded"
    commits = [name for name in driver.cloud.names(RUNS, f"{saved}/") if name.endswith("/commit_success.txt")]
    kept = {int(name.split("/")[5]) for name in commits}
    assert STEPS in kept
    assert len(kept) == 2  # Tunix would keep all of them

    assert not (elsewhere / first.run / "stages" / "import.json").exists()  # a checkpoint has all weights
    manifest = read_manifest(driver.cloud.client, RUNS, first.run, RUN_KEY)
    assert manifest is not None
    verify_manifest(driver.cloud.client, RUNS, manifest)
    metrics = manifest.metrics
    assert alone["devices"] == 1
    assert alone["loss"] < alone["loss_before"] / 2
    for name in ("loss_before", "loss", "train_loss"):
        probe = {"loss": "probe_loss", "loss_before": "probe_loss_before"}.get(name, name)
        assert metrics[probe] == pytest.approx(alone[name], abs=LOSS_TOLERANCE), name
    assert (metrics["steps"], metrics["tokens"]) == (STEPS, alone["tokens"])


def test_the_final_error_of_one_host_ends_all_hosts(driver: Driver, cluster: Cluster, tmp_path: Path) -> None:
    """The other hosts wait for it in a collective, and Ray Train for them."""
    work = Work(tmp_path)
    work.begin(JobSpec.model_validate(job_spec()).model_dump(mode="json", by_alias=True), [])
    work.write_result("prepare", {"tpu": False})
    work.rows.write_bytes(b"")
    stage = Driver(driver.cloud, (cluster.image.argv[0], "-c", ONE_HOST_FAILS, str(tmp_path)), driver.environment)
    ended = stage.start(job_spec(), RUN)
    try:
        assert ended.wait() == NOT_FOUND, ended.output[-3000:]
    finally:
        stage.end()
    failed = (work.result("train") or {})["error"]
    assert failed["error_class"] == "permission"
    assert "storage.objects.create was denied to host 1" in failed["message"]
    assert "host 1: Traceback" in ended.output
    deadline = time.monotonic() + TRAIN_SECONDS
    while cluster.workers():
        assert time.monotonic() < deadline, "a worker outlives the training"
        time.sleep(0.2)


def wait_for_second_start(progress: Path, attempt: Attempt, timeout: float = TRAIN_SECONDS) -> int:
    """The step from which Ray's new workers continue. Each start of the training reports the loss before it."""
    deadline = time.monotonic() + timeout
    while True:
        reports = [json.loads(line) for line in progress.read_text().splitlines(keepends=True) if line.endswith("\n")]
        starts = [int(report["step"]) for report in reports if "loss_before" in report]
        if len(starts) > 1:
            return starts[1]
        assert attempt.process.poll() is None, attempt.process.communicate()[0]
        assert time.monotonic() < deadline, f"the training did not start again in {timeout} s"
        time.sleep(0.2)


def import_as(trained: Uninterrupted, work: Path, document: dict[str, Any]) -> None:
    """Give an attempt the imported weights of another run of the same base model, as if it had imported them itself."""
    work.mkdir(parents=True)
    shared = Work(work)
    shared.begin(JobSpec.model_validate(document).model_dump(mode="json", by_alias=True), [])
    shared.write_result("import", {"parameters": str(trained.work / "imported" / "0" / "items")})


def logs_of(work: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in work.glob("logs/*.log"))
