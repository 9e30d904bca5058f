"""The local stack: every emulator and the functions, in two processes, with all state in one directory.

`up` starts it in the background, `down` ends it and everything it started, also after it was killed. What a deployment
creates in a project once (buckets, topics, triggers, the workflow), `_deploy` creates here at each start.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import aiohttp
import psutil

from .containers import processes
from .containers.images import ImageStore
from .db import Database
from .emulators.cloudrun import CloudRunConfig, CloudRunEmulator
from .emulators.cloudrun.store import Store as CloudRunStore
from .emulators.eventarc import EventarcRouter, Trigger
from .emulators.executions import WorkflowsEmulator
from .emulators.pubsub import PubSubEmulator
from .emulators.secretmanager import SecretManagerEmulator
from .emulators.slack import SlackSink
from .emulators.storage import StorageEmulator
from .identity import CLOUD_PLATFORM, Identity
from .server import HOST, Server
from .workflows.clock import SystemClock
from .workflows.engine import Engine

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
PROJECT, LOCATION = "local-project", "us-central1"
SPECS_BUCKET, RUNS_BUCKET = f"{PROJECT}-dropforge-specs", f"{PROJECT}-dropforge-runs"
WORKFLOW = "dropforge-run"
REQUESTS, JOB_EVENTS, RUN_EVENTS = "dropforge-requests", "dropforge-job-events", "dropforge-run-events"
IMAGES = f"{LOCATION}-docker.pkg.dev/{PROJECT}/dropforge"
SWEEP_SECONDS = 60.0
START_SECONDS = 60.0
BIND_SECONDS = 3.0
EVENT_RETRY_SECONDS = 1.0  # Eventarc's own first retry is after 10 s


class StackError(Exception):
    """The stack cannot start, or is not there; the message says why and what to do."""


@dataclass(frozen=True)
class StackInfo:
    """How to reach a running stack. `environment` makes dropforge's clients and settings talk to it."""

    pid: int
    started: float
    http: str
    grpc: str
    functions: str
    project: str
    environment: dict[str, str]


@dataclass(frozen=True)
class Leftovers:
    """What still exists of a stack: cloud resources by name, process ids, listening ports."""

    resources: list[str]
    processes: list[int]
    ports: list[int]

    def __bool__(self) -> bool:
        return bool(self.resources or self.processes or self.ports)


def state_directory(option: str | None = None) -> Path:
    """Where the stack keeps its state: `option`, $DROPFORGE_STATE, or build/local under the current directory."""
    return Path(option or os.environ.get("DROPFORGE_STATE") or "build/local").resolve()


def running(state: Path) -> StackInfo | None:
    """The live stack of a state directory; None when there is none, or only its remains."""
    info = _read_info(state)
    return info if info and _is_alive(info) else None


def up(
    state: Path, *, http_port: int = 0, grpc_port: int = 0, functions_port: int = 0, foreground: bool = False
) -> StackInfo:
    """Start the stack and wait until it is ready; one that runs already is left as it is.

    In the foreground it serves until SIGTERM or SIGINT. Raises StackError.
    """
    if info := running(state):
        return info
    state.mkdir(parents=True, exist_ok=True)
    ports = _ports(state, http_port, grpc_port, functions_port)
    if foreground:
        asyncio.run(_serve(state, ports))
        raise SystemExit(0)
    return _start_in_background(state, ports)


def down(state: Path, *, delete: bool = False) -> list[str]:
    """Stop the stack and end every container process it started; what had to be ended, by name.

    Works on the remains of a killed stack as well. `delete` removes the state afterwards.
    """
    ended = []
    for pid in _stack_processes(state):
        ended.append(f"stack (pid {pid})")
        _terminate(pid)
    ended += processes.end_all(state / "containers")
    (state / "stack.json").unlink(missing_ok=True)
    if delete:
        shutil.rmtree(state, ignore_errors=True)
    return ended


def leftovers(state: Path) -> Leftovers:
    """What still exists: the emulators' resources, processes of containers and of the stack, ports they listen on."""
    pids = [pid for members in processes.find_members(state / "containers").values() for pid in members]
    pids += _stack_processes(state)
    ports = json.loads((state / "ports.json").read_text()) if (state / "ports.json").exists() else []
    resources, service_ports = _emulated(state)
    return Leftovers(resources, pids, [port for port in [*ports, *service_ports] if _is_listening(port)])


@dataclass(frozen=True)
class StackConfig:
    """What a stack is told beside its ports; kept in <state>/config.json, so that a restart finds it.

    `images` is the repository whose containers/ the images are made from; `settings` overrides the functions'
    environment; `cloud_run` are fields of the emulator's CloudRunConfig (quota, latencies).
    """

    images: str = str(ROOT)
    settings: dict[str, str] = field(default_factory=dict)
    cloud_run: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Path) -> StackConfig:
        path = state / "config.json"
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def save(self, state: Path) -> None:
        state.mkdir(parents=True, exist_ok=True)
        _replace(state / "config.json", json.dumps(asdict(self)))


class Stack:
    """Every emulator, the functions' process and the scheduler, on one event loop."""

    def __init__(self, state: Path, ports: list[int]) -> None:
        self.state = state
        self.config = StackConfig.of(state)
        self.clock = SystemClock()
        self.db = Database(state / "state.db")
        self.identity = Identity(_secret(state))
        self.functions_url = ""
        self._http_port, self._grpc_port, self._functions_port = ports
        self._functions: subprocess.Popen[bytes] | None = None
        self._build()
        self._server = Server(self.emulators, self._http_port, self._grpc_port)

    def _build(self) -> None:
        token = self.identity.token
        self.pubsub = PubSubEmulator(self.db, self.clock, token=lambda audience: token("OIDC", audience))
        self.eventarc = EventarcRouter(self.pubsub, PROJECT, LOCATION, minimum_backoff_seconds=EVENT_RETRY_SECONDS)
        self.storage = StorageEmulator(
            self.db, self.state / "blobs", self.clock, on_change=self.eventarc.on_object_change, project=PROJECT
        )
        self.secrets = SecretManagerEmulator(self.db, self.clock, PROJECT)
        self.slack = SlackSink(self.db, self.clock)
        self.images = ImageStore(Path(self.config.images), self.state / "images", Path(sys.executable))
        self.cloudrun = CloudRunEmulator(
            self.db,
            self.clock,
            images=self.images,
            directory=self.state / "containers",
            platform_env=self._platform_environment,
            access_secret=self.secrets.access,
            authorize=self.identity.is_known,
            config=CloudRunConfig(**self.config.cloud_run),
        )
        self.engine = Engine(
            self.db,
            clock=self.clock,
            token=token,
            authorize=self.identity.is_known,
            repeatable=lambda url: url.startswith(self.functions_url),  # every stage is idempotent
        )
        self.workflows = WorkflowsEmulator(self.engine)
        self.emulators: list[Any] = [
            self.storage, self.pubsub, self.eventarc, self.secrets, self.slack, self.cloudrun, self.workflows,
        ]  # fmt: skip

    async def start(self) -> StackInfo:
        """Bind, deploy and start. Raises StackError when a port is taken."""
        listener = await _bind(self._functions_port)
        self.functions_url = f"http://{HOST}:{listener.getsockname()[1]}/"
        self._server.before_start = self._deploy
        try:
            await self._server.start()
        except OSError as error:
            raise StackError(f"{error}; choose other ports with --http-port and --grpc-port") from error
        self._start_functions(listener)
        await self._wait_for_functions()
        self._tasks = [asyncio.create_task(self._schedule_sweeps()), asyncio.create_task(self._watch_functions())]
        return self.info()

    async def stop(self) -> None:
        """Stop serving. Container processes go on: they belong to the state directory, `down` ends them."""
        for task in self._tasks:
            task.cancel()
        await self._server.stop()
        if self._functions is not None:
            self._functions.terminate()
            await asyncio.to_thread(self._functions.wait, 10)
        self.db.close()

    def info(self) -> StackInfo:
        pid = os.getpid()
        return StackInfo(
            pid=pid,
            started=psutil.Process(pid).create_time(),
            http=self._server.url,
            grpc=self._server.grpc_address,
            functions=self.functions_url,
            project=PROJECT,
            environment=self.environment(),
        )

    def environment(self) -> dict[str, str]:
        """What the functions and the command line need to talk to this stack."""
        return {
            **self._platform_environment(),
            "CLOUD_RUN_EMULATOR_HOST": self._server.url,
            "SECRET_MANAGER_EMULATOR_HOST": self._server.url,
            "WORKFLOWS_EMULATOR_HOST": self._server.grpc_address,
            "DROPFORGE_EMULATOR_TOKEN": self.identity.token("OAuth2", CLOUD_PLATFORM),
            "DROPFORGE_PROJECT": PROJECT,
            "DROPFORGE_LOCATION": LOCATION,
            "DROPFORGE_SPECS_BUCKET": SPECS_BUCKET,
            "DROPFORGE_RUNS_BUCKET": RUNS_BUCKET,
            "DROPFORGE_WORKFLOW": WORKFLOW,
            "DROPFORGE_REQUESTS_TOPIC": REQUESTS,
            "DROPFORGE_JOB_EVENTS_TOPIC": JOB_EVENTS,
            "DROPFORGE_RUN_EVENTS_TOPIC": RUN_EVENTS,
            "DROPFORGE_TRAIN_TRL_IMAGE": f"{IMAGES}/train-trl:local",
            "DROPFORGE_SERVE_VLLM_IMAGE": f"{IMAGES}/serve-vllm:local",
            "DROPFORGE_TRAINER_SERVICE_ACCOUNT": f"dropforge-trainer@{PROJECT}.iam.gserviceaccount.com",
            "DROPFORGE_SERVER_SERVICE_ACCOUNT": f"dropforge-server@{PROJECT}.iam.gserviceaccount.com",
            "DROPFORGE_SLACK_WEBHOOK_SECRET": "slack-webhook",
            "DROPFORGE_CHECK_INTERVAL_SECONDS": "5",  # a crash without an event should not keep anybody waiting here
            **self.config.settings,
        }

    def _platform_environment(self) -> dict[str, str]:
        """What stands for the metadata server in every container: where storage and Pub/Sub are."""
        return {"STORAGE_EMULATOR_HOST": self._server.url, "PUBSUB_EMULATOR_HOST": self._server.grpc_address}

    def _deploy(self) -> None:
        """What Terraform does in a project, idempotent; ports are known, nothing is served yet."""
        self.engine.callback_base_url = self._server.url
        for bucket in (SPECS_BUCKET, RUNS_BUCKET):
            self.storage.create_bucket(bucket)
        for topic in (REQUESTS, JOB_EVENTS, RUN_EVENTS):
            self.pubsub.create_topic(f"projects/{PROJECT}/topics/{topic}")
        self.secrets.set_secret("slack-webhook", f"{self._server.url}/slack/services/T000/B000/local".encode())
        for name, event_type, filters in _triggers():
            self.eventarc.ensure_trigger(
                Trigger(name, event_type, filters, self.functions_url + name.replace("-", "_"))
            )
        source = (ROOT / "workflows" / "run.workflows.yaml").read_text()
        name = f"projects/{PROJECT}/locations/{LOCATION}/workflows/{WORKFLOW}"
        self.engine.deploy(name, source, env={"FUNCTIONS_URL": self.functions_url})

    def _start_functions(self, listener: socket.socket) -> None:
        base = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        command = [sys.executable, "-m", "dropforge_local.functions_host", self.functions_url, str(listener.fileno())]
        self._listener = listener
        with (self.state / "functions.log").open("ab") as output:
            self._functions = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**base, **self.environment()},
                pass_fds=[listener.fileno()],
                cwd=self.state,
            )
        assert self._functions.stdin is not None
        self._functions.stdin.write(_secret(self.state).encode() + b"\n")
        self._functions.stdin.flush()

    async def _wait_for_functions(self) -> None:
        """Until the functions answer anything; the socket accepts before they do."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=START_SECONDS)) as session:
            try:
                async with session.get(self.functions_url):
                    return
            except (aiohttp.ClientError, TimeoutError) as error:
                raise StackError(f"the functions did not start; see {self.state / 'functions.log'}") from error

    async def _watch_functions(self) -> None:
        """Start the functions' process again when it dies, as the platform would."""
        while True:
            assert self._functions is not None
            if self._functions.poll() is not None:
                log.error("the functions' process ended with %s; starting it again", self._functions.returncode)
                self._start_functions(self._listener)
            await asyncio.sleep(1)

    async def _schedule_sweeps(self) -> None:
        """Cloud Scheduler's part."""
        headers = {"Authorization": f"Bearer {self.identity.token('OIDC', self.functions_url + 'sweep')}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.post(self.functions_url + "sweep", json={}):
                        pass


def _triggers() -> list[tuple[str, str, dict[str, str]]]:
    published = "google.cloud.pubsub.topic.v1.messagePublished"
    return [
        ("on-spec-uploaded", "google.cloud.storage.object.v1.finalized", {"bucket": SPECS_BUCKET}),
        ("on-spec-message", published, {"topic": f"projects/{PROJECT}/topics/{REQUESTS}"}),
        ("on-job-event", published, {"topic": f"projects/{PROJECT}/topics/{JOB_EVENTS}"}),
    ]


async def _serve(state: Path, ports: list[int]) -> None:
    """Run the stack until SIGTERM or SIGINT."""
    with _locked(state):
        stack = Stack(state, ports)
        info = await stack.start()
        _replace(state / "ports.json", json.dumps([_port(info.http), _port(info.grpc), _port(info.functions)]))
        _replace(state / "stack.json", json.dumps(asdict(info), indent=2))
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await stop.wait()
        (state / "stack.json").unlink(missing_ok=True)
        await stack.stop()


def _start_in_background(state: Path, ports: list[int]) -> StackInfo:
    (state / "stack.json").unlink(missing_ok=True)
    log_path = state / "stack.log"
    offset = log_path.stat().st_size if log_path.exists() else 0
    pid = _spawn([sys.executable, "-m", "dropforge_local.stack", str(state), *map(str, ports)], log_path)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if (info := _read_info(state)) and info.pid == pid:
            return info
        if not psutil.pid_exists(pid):
            reason = log_path.read_bytes()[offset:].decode(errors="replace").strip().splitlines()
            raise StackError(reason[-1] if reason else f"the stack ended; see {log_path}")
        time.sleep(0.02)
    _terminate(pid)
    raise StackError(f"the stack was not ready after {START_SECONDS:.0f} s; see {log_path}")


def _spawn(command: list[str], log_path: Path) -> int:
    """Start a process that outlives this one and is no child of it; its pid."""
    script = 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 & echo $!'
    shell = subprocess.run(
        ["sh", "-c", script, "sh", str(log_path), *command],
        stdout=subprocess.PIPE,
        check=True,
        start_new_session=True,
    )
    return int(shell.stdout)


def _ports(state: Path, *asked: int) -> list[int]:
    """The ports to use: as asked, else those of the last start, so that URLs given out before still work."""
    path = state / "ports.json"
    last = json.loads(path.read_text()) if path.exists() else [0, 0, 0]
    return [port or before for port, before in zip(asked, last, strict=True)]


async def _bind(port: int) -> socket.socket:
    """A listening socket. The functions of a killed stack may hold the port for a moment: it is waited for."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + BIND_SECONDS
    while True:
        try:
            listener.bind((HOST, port))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                listener.close()
                reason = f"cannot listen on {HOST}:{port}: {error.strerror}"
                raise StackError(f"{reason}; choose another with --functions-port") from error
        await asyncio.sleep(0.05)
    listener.listen(1024)
    return listener


@contextlib.contextmanager
def _locked(state: Path) -> Any:
    """One stack per state directory. Raises StackError."""
    file: IO[str] = (state / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StackError(
            f"another stack uses {state}; end it with `dropforge down`, or choose another --state"
        ) from error
    with file:
        yield


def _secret(state: Path) -> str:
    path = state / "identity"
    if not path.exists():
        _replace(path, secrets.token_hex(32))
    return path.read_text()


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: whoever is killed in between must find something to start from."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.touch(mode=0o600)
    temporary.write_text(text)
    temporary.rename(path)


def _read_info(state: Path) -> StackInfo | None:
    try:
        values = json.loads((state / "stack.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return StackInfo(**{f.name: values[f.name] for f in fields(StackInfo)})


def _is_alive(info: StackInfo) -> bool:
    try:
        process = psutil.Process(info.pid)
        return abs(process.create_time() - info.started) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _stack_processes(state: Path) -> list[int]:
    """The stack's process, also while it starts: stack.json knows only one that is ready."""
    info = running(state)
    pids = {info.pid} if info else set()
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "dropforge_local.stack" in command and str(state) in command:
            pids.add(process.pid)
    return sorted(pids)


def _terminate(pid: int) -> None:
    """End the stack and its functions; those end with it, but may need a moment."""
    try:
        stack = psutil.Process(pid)
        family = [stack, *stack.children(recursive=True)]
        stack.terminate()
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs([p for p in family if not _is_container(p)], timeout=15)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _is_container(process: psutil.Process) -> bool:
    """Containers are ended by `end_all`, group by group."""
    try:
        return "DROPFORGE_CONTAINER_ID" in process.environ()
    except psutil.Error:
        return False


def _emulated(state: Path) -> tuple[list[str], list[int]]:
    """Resources and service ports in the emulators' state; read from the file, so that no stack need run."""
    if not (state / "state.db").exists():
        return [], []
    db = Database(state / "state.db")
    try:
        store = CloudRunStore(db)
        return store.names(), [int(row["port"]) for row in db.connection.execute("SELECT port FROM cloudrun_ports")]
    finally:
        db.close()


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def _port(address: str) -> int:
    return int(address.rstrip("/").rsplit(":", 1)[1])


def main() -> None:
    """`python -m dropforge_local.stack STATE HTTP_PORT GRPC_PORT FUNCTIONS_PORT`"""
    level = os.environ.get("DROPFORGE_LOG_LEVEL", "WARNING")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(_serve(Path(sys.argv[1]), [int(port) for port in sys.argv[2:5]]))
    except StackError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
