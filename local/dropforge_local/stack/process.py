"""The local stack itself: every emulator on one event loop. Its process begins in stack_main.py.

What a deployment creates in a project once (buckets, topics, triggers, the workflow, a cluster), `_deploy` creates here
at each start.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from dropforge_local.base import recording
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.identity import CLOUD_PLATFORM, Identity
from dropforge_local.base.ports import HOST
from dropforge_local.base.recording import FILE, FUNCTIONS, Recorder
from dropforge_local.base.server import Server
from dropforge_local.containers.images import ImageStore
from dropforge_local.emulators.cloudrun import CloudRunConfig, CloudRunEmulator
from dropforge_local.emulators.compute import ComputeConfig, ComputeEmulator
from dropforge_local.emulators.container import GkeConfig, GkeEmulator
from dropforge_local.emulators.eventarc import EventarcRouter, Trigger
from dropforge_local.emulators.executions import WorkflowsEmulator
from dropforge_local.emulators.kubernetes import KubernetesConfig, KubernetesEmulator
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.emulators.secretmanager import SecretManagerEmulator
from dropforge_local.emulators.slack import SlackSink
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.emulators.tpu import TpuConfig, TpuEmulator
from workflows_engine import Engine

from .control import (
    CLUSTER,
    IMAGES,
    LOCATION,
    PROJECT,
    ROOT,
    START_SECONDS,
    StackConfig,
    StackError,
    StackInfo,
    container_directories,
    replace_file,
)
from .crash import CrashSwitch
from .functions_process import FunctionsProcess

log = logging.getLogger(__name__)

SPECS_BUCKET, RUNS_BUCKET = f"{PROJECT}-dropforge-specs", f"{PROJECT}-dropforge-runs"
WORKFLOW = "dropforge-run"
REQUESTS, JOB_EVENTS, RUN_EVENTS = "dropforge-requests", "dropforge-job-events", "dropforge-run-events"
NAMESPACE, TRAINER, SERVER, NODES = "dropforge", "dropforge-trainer", "dropforge-server", "dropforge-nodes"
ROLES = {TRAINER: recording.TRAINER, SERVER: recording.SERVER}  # who calls, by the account's name
EVENT_RETRY_SECONDS = 1.0  # Eventarc's own first retry is after 10 s


class Stack:
    """Every emulator and the scheduler, on one event loop, and the functions, in a process that has begun before."""

    def __init__(self, state: Path, http_port: int, grpc_port: int, functions: FunctionsProcess) -> None:
        self.state = state
        self.config = StackConfig.of(state)
        self.clock = SystemClock()
        self.db = Database(state / "state.db")
        self.identity = Identity(_secret(state))
        self.functions_url = functions.url
        self._functions = functions
        self.recorder = Recorder(state / FILE) if self.config.record else None
        self._build()
        self._server = Server(self.emulators, http_port, grpc_port, self.recorder)
        self._server.durable = self.db.durable

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
            authorize=self._may_invoke,
            config=CloudRunConfig(**self.config.cloud_run),
        )
        self.kubernetes = KubernetesEmulator(
            self.db,
            self.clock,
            images=self.images,
            directory=self.state / "pods",
            platform_env=self._platform_environment,
            authorize=self.identity.is_known,
            note=self._note_kubernetes,
            config=KubernetesConfig(**self.config.kubernetes),
        )
        self.gke = GkeEmulator(self.db, self.clock, kubernetes=self.kubernetes, config=GkeConfig(**self.config.gke))
        self.compute = ComputeEmulator(
            self.db, self.clock, directory=self.state / "disks", config=ComputeConfig(**self.config.compute)
        )
        self.tpu = TpuEmulator(
            self.db,
            self.clock,
            images=self.images,
            directory=self.state / "vms",
            disks=self.compute.disks,
            platform_env=self._machine_environment,
            token=lambda scope: token("OAuth2", scope),
            config=TpuConfig(**self.config.tpu),
        )
        self.engine = Engine(
            self.db,
            clock=self.clock,
            token=token,
            authorize=self.identity.is_known,
            repeatable=lambda url: url.startswith(self.functions_url),  # every stage is idempotent
        )
        self.workflows = WorkflowsEmulator(self.engine)
        self.crash = CrashSwitch(self.db, container_directories(self.state), self._functions.kill)
        self.emulators: list[Any] = [
            self.storage, self.pubsub, self.eventarc, self.secrets, self.slack, self.compute, self.tpu, self.cloudrun,
            self.kubernetes, self.gke, self.workflows, self.crash,
        ]  # fmt: skip

    async def start(self) -> StackInfo:
        """Bind, deploy and start. Raises StackError when a port is taken."""
        self._server.before_start = self._deploy
        try:
            await self._server.start()
        except OSError as error:
            raise StackError(f"{error}; choose other ports with --http-port and --grpc-port") from error
        self._functions.tell(self.environment(FUNCTIONS), _secret(self.state))
        await self._wait_for_functions()
        self._tasks = [asyncio.create_task(self._schedule_sweeps()), asyncio.create_task(self._watch_functions())]
        return self.info()

    async def stop(self) -> None:
        """Stop serving. Container processes go on: they belong to the state directory, `down` ends them."""
        for task in self._tasks:
            task.cancel()
        await self._server.stop()
        await asyncio.to_thread(self._functions.stop)
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

    def environment(self, caller: str = "") -> dict[str, str]:
        """What the functions and the command line need to talk to this stack."""
        http, grpc = self._server.addresses(caller)
        return {
            **_libraries_environment(http, grpc),
            "CLOUD_RUN_EMULATOR_HOST": http,
            "GKE_EMULATOR_HOST": http,
            "TPU_EMULATOR_HOST": http,
            "COMPUTE_EMULATOR_HOST": http,
            "WORKFLOWS_EMULATOR_HOST": grpc,
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
            "DROPFORGE_TRAIN_MAXTEXT_IMAGE": f"{IMAGES}/train-maxtext:local",
            "DROPFORGE_TRAIN_RAY_IMAGE": f"{IMAGES}/train-ray:local",
            "DROPFORGE_SERVE_VLLM_IMAGE": f"{IMAGES}/serve-vllm:local",
            "DROPFORGE_SERVE_VLLM_TPU_IMAGE": f"{IMAGES}/serve-vllm-tpu:local",
            "DROPFORGE_TRAINER_SERVICE_ACCOUNT": f"{TRAINER}@{PROJECT}.iam.gserviceaccount.com",
            "DROPFORGE_SERVER_SERVICE_ACCOUNT": f"{SERVER}@{PROJECT}.iam.gserviceaccount.com",
            "DROPFORGE_NODES_SERVICE_ACCOUNT": f"{NODES}@{PROJECT}.iam.gserviceaccount.com",
            "DROPFORGE_GKE_CLUSTER": CLUSTER.rsplit("/", 1)[1],
            "DROPFORGE_KUBERNETES_NAMESPACE": NAMESPACE,
            "DROPFORGE_KUBERNETES_TRAINER_ACCOUNT": TRAINER,
            "DROPFORGE_KUBERNETES_SERVER_ACCOUNT": SERVER,
            "DROPFORGE_SLACK_WEBHOOK_SECRET": "slack-webhook",
            "DROPFORGE_CHECK_INTERVAL_SECONDS": "5",  # a crash without an event should not keep anybody waiting here
            **self.config.settings,
        }

    def kubeconfig(self) -> str:
        """For kubectl: the deployment's cluster and namespace, with the token that the functions have."""
        name = CLUSTER.rsplit("/", 1)[1]
        authority = base64.b64encode(self.kubernetes.authority_of(CLUSTER).encode()).decode()
        server = f"https://{HOST}:{self.kubernetes.port_of(CLUSTER)}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority-data": authority}}],
            "users": [{"name": name, "user": {"token": self.environment()["DROPFORGE_EMULATOR_TOKEN"]}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": NAMESPACE}}],
        }
        return json.dumps(config, indent=2)

    def _platform_environment(self, account: str) -> dict[str, str]:
        """What stands for the metadata server in every container: where the APIs are that its identity may use."""
        return _libraries_environment(*self._server.addresses(ROLES.get(account.partition("@")[0], "")))

    def _machine_environment(self, account: str) -> dict[str, str]:
        """The same for TPU machines, whose script publishes by REST."""
        environment = self._platform_environment(account)
        return {**environment, "CLOUDSDK_API_ENDPOINT_OVERRIDES_PUBSUB": f"{environment['STORAGE_EMULATOR_HOST']}/"}

    def _may_invoke(self, headers: Mapping[str, str]) -> bool:
        if self.recorder:
            self.recorder.note_endpoint(headers)
        return self.identity.is_known(headers)

    def _note_kubernetes(self, headers: Mapping[str, str], cluster: str, verb: str, resource: str) -> None:
        if self.recorder:
            self.recorder.note_kubernetes(headers, cluster, verb, resource)

    def _deploy(self) -> None:
        """What Terraform does in a project, idempotent; ports are known, nothing is served yet."""
        self.engine.callback_base_url = self._server.url
        for bucket in (SPECS_BUCKET, RUNS_BUCKET):
            self.storage.create_bucket(bucket)
        for topic in (REQUESTS, JOB_EVENTS, RUN_EVENTS):
            self.pubsub.create_topic(f"projects/{PROJECT}/topics/{topic}")
        self.gke.ensure_cluster(CLUSTER)
        self.kubernetes.ensure_objects(CLUSTER, _cluster_objects())
        self.secrets.set_secret("slack-webhook", f"{self._server.url}/slack/services/T000/B000/local".encode())
        for name, event_type, filters in _triggers():
            self.eventarc.ensure_trigger(
                Trigger(name, event_type, filters, self.functions_url + name.replace("-", "_"))
            )
        source = (ROOT / "workflows" / "run.workflows.yaml").read_text()
        name = f"projects/{PROJECT}/locations/{LOCATION}/workflows/{WORKFLOW}"
        self.engine.deploy(name, source, env={"FUNCTIONS_URL": self.functions_url})

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
            if (code := self._functions.poll()) is not None:
                log.error("the functions' process ended with %s; starting it again", code)
                self._functions.begin()
                self._functions.tell(self.environment(FUNCTIONS), _secret(self.state))
            await asyncio.sleep(1)

    async def _schedule_sweeps(self) -> None:
        """Cloud Scheduler's part."""
        headers = {"Authorization": f"Bearer {self.identity.token('OIDC', self.functions_url + 'sweep')}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            while True:
                await asyncio.sleep(self.config.sweep_seconds)
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.post(self.functions_url + "sweep", json={}):
                        pass


def _libraries_environment(http: str, grpc: str) -> dict[str, str]:
    return {"STORAGE_EMULATOR_HOST": http, "PUBSUB_EMULATOR_HOST": grpc, "SECRET_MANAGER_EMULATOR_HOST": http}


def _triggers() -> list[tuple[str, str, dict[str, str]]]:
    published = "google.cloud.pubsub.topic.v1.messagePublished"
    return [
        ("on-spec-uploaded", "google.cloud.storage.object.v1.finalized", {"bucket": SPECS_BUCKET}),
        ("on-spec-deleted", "google.cloud.storage.object.v1.deleted", {"bucket": SPECS_BUCKET}),
        ("on-spec-message", published, {"topic": f"projects/{PROJECT}/topics/{REQUESTS}"}),
        ("on-job-event", published, {"topic": f"projects/{PROJECT}/topics/{JOB_EVENTS}"}),
    ]


def _cluster_objects() -> list[dict[str, Any]]:
    """What the pods of a run need in the cluster: their namespace, and the accounts that stand for their identity."""
    made = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}]
    for account in (TRAINER, SERVER):
        metadata = {"name": account, "namespace": NAMESPACE}
        made.append({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    return made


async def serve(state: Path, http_port: int, grpc_port: int, functions: FunctionsProcess) -> None:
    """Run the stack until SIGTERM or SIGINT. Raises StackError."""
    stack = Stack(state, http_port, grpc_port, functions)
    info = await stack.start()
    replace_file(state / "ports.json", json.dumps([_port(info.http), _port(info.grpc), _port(info.functions)]))
    replace_file(state / "kubeconfig", stack.kubeconfig())
    replace_file(state / "stack.json", json.dumps(asdict(info), indent=2))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    (state / "stack.json").unlink(missing_ok=True)
    await stack.stop()


def _port(address: str) -> int:
    return int(address.rstrip("/").rsplit(":", 1)[1])


def _secret(state: Path) -> str:
    path = state / "identity"
    if not path.exists():
        replace_file(path, secrets.token_hex(32))
    return path.read_text()
