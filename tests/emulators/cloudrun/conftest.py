"""A fake repository with small images, a Cloud Run emulator that runs them, and Google's own clients for it."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from google.api_core.future.polling import RETRY_PREDICATE as is_pending
from google.api_core.retry import Retry
from google.auth.credentials import AnonymousCredentials
from google.cloud import run_v2

from dropforge_local.base.clock import Clock, SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.ports import free_port
from dropforge_local.base.server import BackgroundServer, Server
from dropforge_local.containers.images import ImageStore
from dropforge_local.containers.processes import end_all, find_members
from dropforge_local.emulators.cloudrun import CloudRunConfig, CloudRunEmulator
from dropforge_local.emulators.kit.host import Host

if TYPE_CHECKING:
    from ..own_process import OwnProcess

PARENT = "projects/p1/locations/us-central1"
REGISTRY = "us-central1-docker.pkg.dev/p1/dropforge"

JOB_PY = """
    import json, os, signal, sys, time
    mode = sys.argv[1] if len(sys.argv) > 1 else "succeed"
    print("task", os.environ["CLOUD_RUN_TASK_INDEX"], "attempt", os.environ["CLOUD_RUN_TASK_ATTEMPT"], mode, flush=True)
    if mode == "fail":
        sys.exit(7)
    if mode == "fail-first" and os.environ["CLOUD_RUN_TASK_ATTEMPT"] == "0":
        sys.exit(1)
    if mode == "fail-other" and os.environ["CLOUD_RUN_TASK_INDEX"] == "0":
        sys.exit(1)
    if mode in ("sleep", "fail-other"):
        time.sleep(float(sys.argv[2]))
        sys.exit(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    if mode == "wait-for":
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.02)
        sys.exit(int(sys.argv[3]))
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ignoring", flush=True)
        time.sleep(600)
    if mode == "polite":
        signal.signal(signal.SIGTERM, lambda *_: (print("checkpoint", flush=True), sys.exit(0)))
        print("waiting", flush=True)
        time.sleep(600)
    if mode == "hog":
        data = bytearray(700 * 2**20)
        time.sleep(600)
    if mode == "env":
        print(json.dumps(dict(os.environ)))
"""

SERVER_PY = """
    import http.server, json, os, signal, sys, threading, time
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    NEXT = threading.Semaphore(0)
    MODE = os.environ.get("MODE", "")
    print("serving", os.environ["K_REVISION"], flush=True)
    if MODE == "die":
        print("model not found", flush=True)
        sys.exit(3)
    if MODE == "mute":
        print("never listening", flush=True)
        time.sleep(300)
    STARTED = time.time()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        def log_message(self, *args): pass
        def answer(self, code, body, kind="application/json"):
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def do_GET(self):
            if self.path.startswith("/health"):
                return self.answer(200 if time.time() - STARTED > float(os.environ.get("WARM_UP", "0")) else 503, b"{}")
            if self.path.startswith("/crash"):
                os._exit(9)
            if self.path.startswith("/slow"):
                time.sleep(float(self.path.partition("=")[2]))
                return self.answer(200, b"{}")
            if self.path.startswith("/next"):
                NEXT.release()
                return self.answer(200, b"{}")
            if self.path.startswith("/stream"):
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for number in range(3):
                    data = f"data: {number}\\n\\n".encode()
                    self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))
                    self.wfile.flush()
                    NEXT.acquire()
                self.wfile.write(b"0\\r\\n\\r\\n")
                return
            info = {"pid": os.getpid(), "revision": os.environ["K_REVISION"], "service": os.environ["K_SERVICE"],
                    "path": self.path, "headers": dict(self.headers)}
            self.answer(200, json.dumps(info).encode())
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.answer(201, body, "application/octet-stream")

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
    Server(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""

DOCKERFILE = """
FROM python:3.11
WORKDIR /app
COPY containers/{role}/main.py /app/main.py
ENV PYTHONPATH=/app
ENTRYPOINT ["python", "/app/main.py"]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """containers/train_job and containers/serve_echo."""
    root = tmp_path / "repo"
    for role, code in (("train_job", JOB_PY), ("serve_echo", SERVER_PY)):
        folder = root / "containers" / role
        folder.mkdir(parents=True)
        (folder / "Dockerfile").write_text(DOCKERFILE.format(role=role))
        (folder / "main.py").write_text(textwrap.dedent(code))
    return root


@dataclass
class Cloud:
    """The address of a running emulator, and clients for it."""

    url: str
    directory: Path
    live: Callable[[], list[str]] = list
    grpc: str = ""
    clock: Any = None  # a HeldClock, if the emulator runs in this process

    def client(self, kind: Any) -> Any:
        return kind(transport="rest", client_options={"api_endpoint": self.url}, credentials=AnonymousCredentials())

    @property
    def jobs(self) -> run_v2.JobsClient:
        return self.client(run_v2.JobsClient)

    @property
    def executions(self) -> run_v2.ExecutionsClient:
        return self.client(run_v2.ExecutionsClient)

    @property
    def tasks(self) -> run_v2.TasksClient:
        return self.client(run_v2.TasksClient)

    @property
    def services(self) -> run_v2.ServicesClient:
        return self.client(run_v2.ServicesClient)

    @property
    def revisions(self) -> run_v2.RevisionsClient:
        return self.client(run_v2.RevisionsClient)

    def faults(self, **switches: Any) -> dict[str, Any]:
        return self.call("POST", "/_local/cloudrun/faults", switches)

    def logs(self, resource: str, tail: int | None = None) -> str:
        query = "" if tail is None else f"?tail={tail}"
        with urllib.request.urlopen(f"{self.url}/_local/logs/{resource}{query}", timeout=60) as response:
            return str(response.read().decode())

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    def wait(self, name: str, seconds: float = 200.0) -> run_v2.Execution:
        """The execution once it has completed."""
        return self.until(
            lambda: self.executions.get_execution(name=name), lambda execution: bool(execution.completion_time), seconds
        )

    def done(self, operation: Any) -> Any:
        """The result of an operation, polled more often than once a second, the client's default."""
        return operation.result(timeout=60, polling=Retry(initial=0.02, maximum=0.1, predicate=is_pending))

    def until(self, read: Callable[[], Any], accept: Callable[[Any], bool], seconds: float = 200.0) -> Any:
        from tests.patience import until  # not where this file is a program: see build_emulator's import

        return until(read, accept, seconds)

    def processes(self) -> list[int]:
        return [pid for members in find_members(self.directory).values() for pid in members]


def make_job(*args: str, **task: Any) -> run_v2.Job:
    limits = task.pop("limits", {"cpu": "1", "memory": "512Mi"})
    container = {"image": f"{REGISTRY}/train-job:latest", "args": list(args), "resources": {"limits": limits}}
    container |= task.pop("container", {})
    template = {"max_retries": 0, "timeout": "600s", "containers": [container], **task}
    execution = {"template": template} | {
        key: template.pop(key) for key in ("task_count", "parallelism") if key in template
    }
    return run_v2.Job.from_json(json.dumps({"template": execution}))


def make_service(env: Mapping[str, str] | None = None, **template: Any) -> run_v2.Service:
    container = {
        "image": f"{REGISTRY}/serve-echo:latest",
        "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
        **template.pop("container", {}),
    }
    top = {key: template.pop(key) for key in ("traffic", "invoker_iam_disabled", "labels") if key in template}
    return run_v2.Service.from_json(json.dumps({**top, "template": {"containers": [container], **template}}))


@pytest.fixture
def secrets() -> dict[tuple[str, str], bytes]:
    return {("projects/p1/secrets/hf-token", "latest"): b"s3cret"}


@pytest.fixture
def config() -> CloudRunConfig:
    return CloudRunConfig(operation_seconds=0.02, grace_seconds=1.0, probe_seconds=0.05, restart_seconds=0.1)


@pytest.fixture
def cloud(
    tmp_path: Path, repository: Path, secrets: dict[tuple[str, str], bytes], config: CloudRunConfig
) -> Iterator[Cloud]:
    """The emulator in this process. The fixture ends the containers that the emulator leaves running."""
    from ..clocks import HeldClock  # a `Stack` runs this file as a program, which has no packages above it

    made: list[CloudRunEmulator] = []
    clock = HeldClock()

    def build() -> list[CloudRunEmulator]:
        made.append(build_emulator(tmp_path, secrets, config, clock))
        return made

    async def live() -> list[str]:
        return made[0].live()

    background = BackgroundServer(build)
    with background as server:
        yield Cloud(server.url, tmp_path / "containers", lambda: background.call(live()), server.grpc_address, clock)
    end_all(tmp_path / "containers", grace_seconds=0)


def build_emulator(
    home: Path, secrets: Mapping[tuple[str, str], bytes], config: CloudRunConfig, clock: Clock
) -> CloudRunEmulator:
    return CloudRunEmulator(
        Host(
            Database(home / "state.db"),
            clock,
            ImageStore(home / "repo", home / "images", Path(sys.executable)),
            home / "containers",
            lambda account: {"DROPFORGE_ENDPOINT": "http://127.0.0.1:1"},
        ),
        access_secret=lambda name, version: secrets[name, version],
        authorize=lambda headers: headers.get("Authorization") == "Bearer good",
        config=config,
    )


class Stack:
    """The emulator in a process of its own, which tests kill and start again with the same state."""

    program = __file__

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port(range(30000, 32000), set())
        self.process: OwnProcess | None = None

    def start(self) -> Cloud:
        from ..own_process import OwnProcess  # a `Stack` also runs this file as a program, see build_emulator's import

        self.process = OwnProcess(serve, self.home, self.port)
        return Cloud(f"http://127.0.0.1:{self.port}", self.home / "containers")

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process = None


@pytest.fixture
def stack(tmp_path: Path, repository: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path)
    yield stack
    stack.kill()
    end_all(tmp_path / "containers", grace_seconds=0)


@pytest.fixture
def make() -> Any:
    """The builders of jobs and services, and the names in them."""

    class Make:
        job = staticmethod(make_job)
        service = staticmethod(make_service)
        parent = PARENT
        registry = REGISTRY

    return Make


async def serve(home: Path, port: int, ready: Callable[[Any], None]) -> None:
    """The main program of a `Stack`."""
    config = CloudRunConfig(operation_seconds=0.02, grace_seconds=1.0, probe_seconds=0.05, restart_seconds=0.1)
    server = Server([build_emulator(home, {}, config, SystemClock())], http_port=port)
    await server.start()
    ready(server.url)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), print))
