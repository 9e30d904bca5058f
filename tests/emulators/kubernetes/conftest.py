"""A repository with small test images, a cluster that runs them, and the official client."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import textwrap
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from tests.patience import until

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Server
from dropforge_local.containers.images import ImageStore
from dropforge_local.containers.processes import end_all, find_members
from dropforge_local.emulators.kit.host import Host
from dropforge_local.emulators.kubernetes import Accelerator, KubernetesConfig, KubernetesEmulator

from ..own_process import OwnProcess, Ready

NAME = "projects/p1/locations/us-central1/clusters/c1"
REGISTRY = "us-central1-docker.pkg.dev/p1/dropforge"
TOKEN = "Bearer good"

JOB_PY = """
    import json, os, signal, sys, time
    mode = sys.argv[1] if len(sys.argv) > 1 else "succeed"
    print("index", os.environ.get("JOB_COMPLETION_INDEX", "-"), mode, flush=True)
    if mode == "exit":
        sys.exit(int(sys.argv[2]))
    if mode == "fail-until":  # the first N of all runs fail, counted in a shared file
        with open(sys.argv[2], "a") as file:
            file.write("x")
        sys.exit(1 if os.path.getsize(sys.argv[2]) <= int(sys.argv[3]) else 0)
    if mode == "sleep":
        time.sleep(float(sys.argv[2]))
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ignoring", flush=True)
        time.sleep(600)
    if mode == "polite":
        signal.signal(signal.SIGTERM, lambda *_: (print("checkpoint", flush=True), sys.exit(int(sys.argv[2]))))
        print("waiting", flush=True)
        time.sleep(600)
    if mode == "hog":
        data = bytearray(300 * 2**20)
        time.sleep(600)
    if mode == "env":
        print(json.dumps(dict(os.environ)))
        print(json.dumps(sys.argv[2:]))
    if mode == "write":
        open(sys.argv[2], "w").write(sys.argv[3])
    if mode == "read":
        print(open(sys.argv[2]).read(), flush=True)
    if mode == "wait-for":
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.02)
    if mode == "count":
        while len(sys.argv) > 4 and not os.path.exists(sys.argv[4]):
            time.sleep(0.02)
        for number in range(int(sys.argv[2])):
            print("line", number, flush=True)
            time.sleep(float(sys.argv[3]))
"""

SERVER_PY = """
    import http.server, os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    STARTED, WARM_UP = time.time(), float(os.environ.get("WARM_UP", "0"))
    print("serving", os.environ["PORT"], flush=True)
    SICK = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        def log_message(self, *args): pass
        def answer(self, code, body):
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def do_GET(self):
            if self.path.endswith("/slow"):
                time.sleep(3)
            if self.path == "/sicken":
                SICK.append(1)
            if self.path == "/health":
                warm = time.time() - STARTED >= WARM_UP and not SICK
                return self.answer(200 if warm else 503, b"")
            self.answer(200, f"{os.environ.get('VERSION', '')} {os.environ['HOSTNAME']} {self.path}".encode())
        def do_POST(self):
            self.answer(201, self.rfile.read(int(self.headers["Content-Length"])))

    http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""

DOCKERFILE = """
FROM python:3.11
WORKDIR /app
COPY containers/{role}/main.py /app/main.py
ENTRYPOINT ["python", "-S", "/app/main.py"]
"""

CONFIG = KubernetesConfig(
    accelerators={"nvidia-l4": Accelerator(8, 4), "nvidia-b200": Accelerator(8, 16)},
    reservations=frozenset({"known"}),
    node_seconds=0.05,
    node_idle_seconds=0.5,
    job_backoff_seconds=0.05,
    restart_seconds=0.1,
    pull_retry_seconds=0.1,
    probe_seconds=0.05,
    preemption_grace_seconds=2.0,
    ray_probe_seconds=0,
    watch_history=200,
)


@dataclass
class Kube:
    """The address and the clients of a running cluster."""

    url: str
    admin: str
    authority: str
    directory: Path
    namespace: str = field(default_factory=lambda: f"t-{uuid.uuid4().hex[:8]}")
    live: Callable[[], list[str]] = list

    def __post_init__(self) -> None:
        self.api = make_client(self.url, self.authority)
        self._tls = ssl.create_default_context(cadata=self.authority)
        # Any: the tests send dicts, which the client takes although its annotations name its models only.
        self.core: Any = client.CoreV1Api(self.api)
        self.batch: Any = client.BatchV1Api(self.api)
        self.apps: Any = client.AppsV1Api(self.api)
        self.custom: Any = client.CustomObjectsApi(self.api)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "application/json",
        token: str = TOKEN,
        accept: str = "*/*",
    ) -> tuple[int, Any, Any]:
        """Send a raw request; return status, JSON body and headers."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": kind, "Accept": accept, **({"Authorization": token} if token else {})}
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60, context=self._tls) as response:
                text = response.read()
                is_json = "json" in response.headers["Content-Type"]
                return response.status, json.loads(text) if is_json else text.decode(), response.headers
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
                return error.code, json.loads(text) if text[:1] == b"{" else text.decode(), error.headers

    def faults(self, **switches: Any) -> dict[str, Any]:
        data = json.dumps(switches).encode()
        request = urllib.request.Request(f"{self.admin}/_local/kubernetes/faults", data=data, method="POST")
        with urllib.request.urlopen(request, timeout=60) as response:
            switched: dict[str, Any] = json.loads(response.read())
            return switched

    def until(self, read: Callable[[], Any], accept: Callable[[Any], Any], seconds: float = 200.0) -> Any:
        return until(read, accept, seconds)

    def job(self, name: str) -> Any:
        return self.batch.read_namespaced_job(name, self.namespace)

    def create_job(self, name: str, *args: str, **spec: Any) -> Any:
        return self.batch.create_namespaced_job(self.namespace, make_job(name, *args, **spec))

    def wait_job(self, name: str, seconds: float = 200.0) -> Any:
        """The job once it has ended."""
        return self.until(lambda: self.job(name), lambda job: ended(job), seconds)

    def pods(self, selector: str = "") -> list[Any]:
        return list(self.core.list_namespaced_pod(self.namespace, label_selector=selector).items)

    def pod(self, name: str) -> Any:
        return self.core.read_namespaced_pod(name, self.namespace)

    def wait_pod(self, name: str, phase: str, seconds: float = 200.0) -> Any:
        return self.until(lambda: self.pod(name), lambda pod: pod.status.phase == phase, seconds)

    def create_pod(self, name: str, *args: str, **spec: Any) -> Any:
        return self.core.create_namespaced_pod(self.namespace, make_pod(name, *args, **spec))

    def log(self, name: str, **options: Any) -> str:
        return str(self.core.read_namespaced_pod_log(name, self.namespace, **options))

    def events(self, name: str = "") -> list[tuple[str, str]]:
        items = self.core.list_namespaced_event(self.namespace).items
        return [(event.reason, event.message) for event in items if not name or event.involved_object.name == name]

    def processes(self) -> list[int]:
        return [pid for members in find_members(self.directory).values() for pid in members]


def make_client(url: str, authority: str, token: str = TOKEN) -> client.ApiClient:
    configuration = client.Configuration(host=url, ca_cert_data=authority)
    configuration.api_key = {"authorization": token}
    configuration.retries = False
    return client.ApiClient(configuration)


def ended(job: Any) -> Any:
    """The final condition of a job; None while it runs."""
    conditions = job.status.conditions or []
    return next((item for item in conditions if item.type in ("Complete", "Failed") and item.status == "True"), None)


def make_container(*args: str, **more: Any) -> dict[str, Any]:
    return {"name": "main", "image": f"{REGISTRY}/train-job:v1", "args": list(args), **more}


def make_pod_spec(*args: str, **more: Any) -> dict[str, Any]:
    container = make_container(*args, **more.pop("container", {}))
    return {"restartPolicy": "Never", "terminationGracePeriodSeconds": 2, "containers": [container], **more}


def make_pod(name: str, *args: str, **more: Any) -> dict[str, Any]:
    labels = more.pop("labels", {})
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": make_pod_spec(*args, **more)}


def make_job(name: str, *args: str, **more: Any) -> dict[str, Any]:
    template = {"spec": make_pod_spec(*args, **more.pop("pod", {}))}
    spec = {"backoffLimit": 0, "template": template, **more}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def make_deployment(name: str, replicas: int = 1, env: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1}
    container = {
        "name": "server",
        "image": f"{REGISTRY}/serve-echo:v1",
        "ports": [{"containerPort": 8000, "name": "http"}],
        "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
        "readinessProbe": probe,
        **more.pop("container", {}),
    }
    pod = {"terminationGracePeriodSeconds": 1, "containers": [container]}
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        **more,
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def write_images(root: Path) -> None:
    """Write containers/train_job and containers/serve_echo."""
    for role, code in (("train_job", JOB_PY), ("serve_echo", SERVER_PY)):
        folder = root / "containers" / role
        folder.mkdir(parents=True)
        (folder / "Dockerfile").write_text(DOCKERFILE.format(role=role))
        (folder / "main.py").write_text(textwrap.dedent(code))


def build_emulator(home: Path, config: KubernetesConfig = CONFIG) -> KubernetesEmulator:
    return KubernetesEmulator(
        Host(
            Database(home / "state.db"),
            SystemClock(),
            ImageStore(home / "repo", home / "images", Path(sys.executable)),
            home / "containers",
            lambda account: {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"},
        ),
        authorize=lambda headers: headers.get("Authorization") == TOKEN,
        config=config,
    )


class Running:
    """The emulator on a second thread of this process."""

    def __init__(self, home: Path) -> None:
        self.home = home
        write_images(home / "repo")
        self._made: list[KubernetesEmulator] = []
        self._background = BackgroundServer(self._build)

    def __enter__(self) -> Running:
        self._server = self._background.__enter__()
        self.open(NAME)
        return self

    def __exit__(self, *exc: object) -> None:
        self._background.__exit__(*exc)
        end_all(self.home / "containers", grace_seconds=0)

    def open(self, name: str) -> None:
        async def add() -> None:
            self._made[0].add_cluster(name)
            await self._made[0].open_cluster(name)

        self._background.call(add())

    def address(self, name: str) -> tuple[str, str]:
        """(URL, certificate authority) of a cluster."""

        async def read() -> tuple[str, str]:
            return f"https://127.0.0.1:{self._made[0].port_of(name)}", self._made[0].authority_of(name)

        return self._background.call(read())

    def remove(self, name: str) -> None:
        self._background.call(self._made[0].remove_cluster(name))

    def live(self) -> list[str]:
        async def read() -> list[str]:
            return self._made[0].live()

        return self._background.call(read())

    def kube(self, name: str = NAME) -> Kube:
        url, authority = self.address(name)
        kube = Kube(url, self._server.url, authority, self.home / "containers", live=self.live)
        kube.core.create_namespace({"metadata": {"name": kube.namespace}})
        return kube

    def _build(self) -> list[KubernetesEmulator]:
        self._made.append(build_emulator(self.home))
        return self._made


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A single emulator for all tests; each test uses a separate namespace."""
    with Running(tmp_path_factory.mktemp("kubernetes")) as emulator:
        yield emulator


@pytest.fixture
def kube(running: Running) -> Iterator[Kube]:
    """The cluster with a namespace for the test, which is emptied afterwards."""
    kube = running.kube()
    yield kube
    kube.faults(stockout=[], quota={}, fail_next=[])
    for pod in kube.pods():
        kube.call("DELETE", f"/api/v1/namespaces/{kube.namespace}/pods/{pod.metadata.name}?gracePeriodSeconds=0")
    kube.core.delete_namespace(kube.namespace)
    kube.api.close()


class Stack:
    """The emulator in a separate process; tests kill it and restart it with the same state."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.kuberay = CONFIG.kuberay
        write_images(home / "repo")
        self.process: OwnProcess | None = None

    def start(self) -> Kube:
        self.process = OwnProcess(serve, self.home, self.kuberay)
        admin, url, authority = self.process.said
        return Kube(url, admin, authority, self.home / "containers", namespace="default")

    def kill(self) -> None:
        """Send SIGKILL, like a crash."""
        if self.process is not None:
            self.process.kill()
            self.process = None


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    yield stack
    stack.kill()
    end_all(tmp_path / "containers", grace_seconds=0)


async def serve(home: Path, kuberay: str, ready: Ready) -> None:
    """The process of a `Stack`."""
    emulator = build_emulator(home, replace(CONFIG, kuberay=kuberay))
    server = Server([emulator])
    emulator.add_cluster(NAME)
    await server.start()
    url = f"https://127.0.0.1:{emulator.port_of(NAME)}"
    ready((server.url, url, emulator.authority_of(NAME)))
    await asyncio.Event().wait()
