"""Target `gke` against the emulated GKE and Kubernetes APIs, over sockets: from the request to nothing left."""

from __future__ import annotations

import json
import sys
import textwrap
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from google.cloud import container_v1

from dropforge import clients, kubernetes
from dropforge.settings import Settings
from dropforge.spec import parse_spec
from dropforge.targets.base import Launch, Phase, Resource, Status
from dropforge.targets.gke import JOB, GkeJobs
from dropforge_local.containers.images import ImageStore
from dropforge_local.containers.processes import end_all
from dropforge_local.db import Database
from dropforge_local.emulators.container import GkeConfig, GkeEmulator
from dropforge_local.emulators.kubernetes import KubernetesConfig, KubernetesEmulator
from dropforge_local.server import BackgroundServer, Emulator
from dropforge_local.workflows.clock import SystemClock

DOCKERFILE = """
FROM python:3.11
WORKDIR /app
COPY containers/train_x/main.py /app/main.py
ENTRYPOINT ["python", "-S", "/app/main.py"]
"""
# What a container does is the first word of its run id.
MAIN_PY = """
    import os, signal, sys, time
    what = os.environ["DROPFORGE_RUN"].split("-")[0]
    def stop(*_):
        sys.exit(75)
    if what == "polite":
        signal.signal(signal.SIGTERM, stop)
    if what == "rank":  # the first machine fails by itself, the others because of that
        time.sleep(0.5 * int(os.environ["JOB_COMPLETION_INDEX"]))
        sys.exit(65 if os.environ["JOB_COMPLETION_INDEX"] == "0" else 70)
    if what.startswith("exit"):
        sys.exit(int(what.removeprefix("exit")))
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what != "succeed":
        time.sleep(60)
"""
IMAGE = "us-central1-docker.pkg.dev/p1/dropforge/train-x:v1"
SETTINGS = replace(
    Settings(*["x"] * 12), project="p1", train_trl_image=IMAGE, gke_cluster="c1", job_events_topic="job-events"
)
STANDING = kubernetes.cluster_name("p1", "us-central1", "c1")
TARGET = GkeJobs()


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
    return Launch(run, 1, 0, parse_spec(json.dumps(spec).encode()), settings, deadline, timeout_seconds)


@dataclass
class Cloud:
    """The emulators, their switches, and what a user with kubectl could do."""

    url: str
    live: Callable[[], list[str]]

    def faults(self, emulator: str, **switches: Any) -> None:
        url, data = f"{self.url}/_local/{emulator}/faults", json.dumps(switches).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data, method="POST"), timeout=10):
            pass

    @property
    def api(self) -> kubernetes.Kubernetes:
        return kubernetes.connect(kubernetes.find_cluster(STANDING))

    def pod(self, attempt: Launch) -> str:
        """The attempt's first pod, as namespace/name."""
        namespace = attempt.settings.kubernetes_namespace
        pods = self.api.find(namespace, "pods", labelSelector=f"dropforge-run={attempt.run}")
        return f"{namespace}/{pods[0]['metadata']['name']}"


def build(home: Path, made: list[Any]) -> Sequence[Emulator]:
    db, clock = Database(home / "state.db"), SystemClock()
    api = KubernetesEmulator(
        db,
        clock,
        images=ImageStore(home / "repo", home / "images", Path(sys.executable)),
        directory=home / "containers",
        platform_env=dict,
        authorize=lambda headers: headers.get("Authorization") == "Bearer good",
        config=KubernetesConfig(
            node_seconds=0.05,
            node_idle_seconds=0.5,
            job_backoff_seconds=0.05,
            pull_retry_seconds=0.1,
            preemption_grace_seconds=1.0,
            reservations=frozenset({"known"}),
        ),
    )
    made.append(api)
    return [api, GkeEmulator(db, clock, kubernetes=api, config=GkeConfig(0.2, 0.2))]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """One standing cluster for all tests, with what Terraform puts into it."""
    home = tmp_path_factory.mktemp("gke")
    folder = home / "repo" / "containers" / "train_x"
    folder.mkdir(parents=True)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    (folder / "main.py").write_text(textwrap.dedent(MAIN_PY))
    made: list[KubernetesEmulator] = []
    background = BackgroundServer(lambda: build(home, made))

    async def live() -> list[str]:
        return made[0].live()

    with background as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv("GKE_EMULATOR_HOST", server.url)
        environment.setenv("DROPFORGE_EMULATOR_TOKEN", "good")
        _forget_clients()
        parent, _, name = STANDING.rpartition("/clusters/")
        clients.gke().create_cluster(parent=parent, cluster={"name": name, "autopilot": {"enabled": True}})
        until(
            lambda: kubernetes.find_cluster(STANDING), lambda found: found.status == container_v1.Cluster.Status.RUNNING
        )
        cloud = Cloud(server.url, lambda: background.call(live()))
        account = {"name": SETTINGS.kubernetes_trainer_account, "namespace": SETTINGS.kubernetes_namespace}
        cloud.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": account["namespace"]}})
        cloud.api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
        yield cloud
        _forget_clients()
    end_all(home / "containers", grace_seconds=0)


@pytest.fixture
def cloud(running: Cloud) -> Iterator[Cloud]:
    yield running
    running.faults("kubernetes", stockout=[], quota={}, fail_next=[])
    running.faults("container", stockout=[], quota={}, fail_next=[])


def _forget_clients() -> None:
    for made in vars(clients).values():
        if hasattr(made, "cache_clear"):
            made.cache_clear()


def until(read: Callable[[], Any], accept: Callable[[Any], Any], seconds: float = 20) -> Any:
    deadline = time.monotonic() + seconds
    while not accept(found := read()):
        assert time.monotonic() < deadline, f"not in time: {found}"
        time.sleep(0.05)
    return found


def provision(attempt: Launch) -> None:
    """As the workflow does it: again until it is launched."""
    until(lambda: TARGET.provision(attempt), bool)


def ended(attempt: Launch) -> Status:
    phases = (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)
    return until(lambda: TARGET.inspect(attempt), lambda status: status.phase in phases)  # type: ignore[no-any-return]


def wait_for(attempt: Launch, phase: Phase) -> Status:
    return until(lambda: TARGET.inspect(attempt), lambda status: status.phase is phase)  # type: ignore[no-any-return]


def tear_down(resources: list[Resource]) -> None:
    """As the stage does it: all of them, again and again until all are verified gone."""
    until(lambda: [one for one in resources if not TARGET.teardown(one.kind, one.name)], lambda left: not left)


def test_an_attempt_from_its_request_to_nothing_left(cloud: Cloud) -> None:
    attempt = launch("succeed")
    assert TARGET.provision(attempt)
    assert TARGET.provision(attempt)  # the reply was lost
    [job] = TARGET.resources(attempt)
    assert len(cloud.api.find("dropforge", "pods", labelSelector=f"dropforge-run={attempt.run}")) <= 1
    status = ended(attempt)
    assert (status.phase, status.exit_code) == (Phase.SUCCEEDED, 0)
    stored = cloud.api.get(job.name)
    assert stored is not None
    assert contains(stored, job.request)
    tear_down([job])
    assert TARGET.inspect(attempt).phase is Phase.GONE
    assert TARGET.teardown(JOB, job.name)
    assert not [name for name in cloud.live() if attempt.run in name]


def contains(stored: Any, sent: Any) -> bool:
    """Whether the server has all that was sent, whatever it added."""
    if isinstance(sent, dict):
        return all(key in stored and contains(stored[key], value) for key, value in sent.items())
    if isinstance(sent, list):
        return len(stored) >= len(sent) and all(contains(*pair) for pair in zip(stored, sent, strict=False))
    return bool(stored == sent)
