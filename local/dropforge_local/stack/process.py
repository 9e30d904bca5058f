"""The local stack itself: every emulator on one event loop. Its process begins in main.py.

What a deployment creates in a project once (buckets, topics, triggers, the workflow, a cluster), `_deploy` creates at
each start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from dropforge_local.base import recording
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.identity import CLOUD_PLATFORM, Identity, new_identity
from dropforge_local.base.ports import HOST
from dropforge_local.base.recording import FILE, FUNCTIONS, Recorder
from dropforge_local.base.server import Server
from dropforge_local.containers.images import ImageStore
from dropforge_local.emulators.channels import ChannelSink
from dropforge_local.emulators.cloudrun import CloudRunConfig, CloudRunEmulator
from dropforge_local.emulators.cloudrun.permissions import INVOKE
from dropforge_local.emulators.compute import ComputeConfig, ComputeEmulator
from dropforge_local.emulators.container import GkeConfig, GkeEmulator
from dropforge_local.emulators.dns import DnsEmulator
from dropforge_local.emulators.eventarc import EventarcRouter, Trigger
from dropforge_local.emulators.kit.host import Host
from dropforge_local.emulators.kubernetes import KubernetesConfig, KubernetesEmulator
from dropforge_local.emulators.kubernetes.certificates import make_certificates, server_context
from dropforge_local.emulators.monitoring import MonitoringEmulator
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.emulators.secretmanager import SecretManagerEmulator
from dropforge_local.emulators.slack import SlackSink
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.emulators.telemetry import TelemetryEmulator
from dropforge_local.emulators.tpu import TpuConfig, TpuEmulator
from dropforge_local.emulators.workflows import WorkflowsEmulator
from dropforge_local.iam import Callers, Policy
from dropforge_local.iam.hcl import HclError
from dropforge_local.iam.policy import PolicyError
from dropforge_local.iam.terraform import read_configuration
from workflows_engine import Engine

from . import deployment
from .certificates import Certificates
from .config import (
    ALL,
    OFF,
    ROOT,
    START_SECONDS,
    StackConfig,
    StackError,
    StackInfo,
    container_directories,
    replace_file,
)
from .console_process import ConsoleProcess
from .crash import CrashSwitch
from .deployment import (
    CLUSTER,
    CONSOLE,
    ENDPOINT_KEY_SECRET,
    JOB_EVENTS,
    LOCATION,
    OPERATIONS,
    PROJECT,
    REQUESTS,
    ROLLOUT_WORKFLOW,
    RUN_EVENTS,
    RUNS_BUCKET,
    SERVER,
    SLACK_SECRET,
    SPECS_BUCKET,
    TRAINER,
    WORKFLOW,
)
from .functions_host import entry_points
from .functions_process import FunctionsProcess
from .tokens import Tokens

log = logging.getLogger(__name__)

ROLES = {TRAINER: recording.TRAINER, SERVER: recording.SERVER}  # the recorded caller of each service account
# Accounts that call functions.
EVENTS, SCHEDULER, WORKFLOWS, CONSOLE_ACCOUNT = "events", "scheduler", "workflow", "console"
DELIVERY_ATTEMPTS = 20  # var.max_delivery_attempts
DEAD_LETTERS = {"messageRetentionDuration": "1209600s", "ackDeadlineSeconds": 60, "expirationPolicy": {}}  # topics.tf
EVENT_RETRY_SECONDS = 1.0  # Eventarc's own first retry is after 10 s


class Stack:
    """Every emulator and the scheduler, on one event loop, the functions, whose process has begun, and the console."""

    def __init__(
        self, state: Path, http_port: int, grpc_port: int, functions: FunctionsProcess, console: ConsoleProcess
    ) -> None:
        self.state = state
        self.config = StackConfig.of(state)
        self.clock = SystemClock()
        self.db = Database(state / "state.db")
        self.identity = Identity(_secret(state), lifetime=self.config.token_seconds)
        self.functions_url = functions.url
        self._functions = functions
        self._console = console
        self.recorder = Recorder(state / FILE, self.identity) if self.config.record else None
        self.callers = self._callers()
        self._build()
        is_open = self.config.users == ALL
        self._server = Server(
            self.emulators,
            http_port,
            grpc_port,
            self.recorder,
            self.callers,
            is_open=is_open,
            keep_alive_seconds=self.config.keep_alive_seconds,
        )
        self._server.durable = self.db.durable
        self._certificates = make_certificates("stack")
        self._server.tls = server_context(self._certificates)
        if (kept := state / "addresses.json").exists():  # containers outlive the stack and keep their addresses
            self._server.kept_ports = json.loads(kept.read_text())

    def _callers(self) -> Callers | None:
        """The accounts of Terraform's files; None if nothing is enforced. Raises StackError."""
        if self.config.iam == OFF:
            return None
        directory = Path(self.config.terraform)
        try:
            policy = Policy(read_configuration(directory, {**deployment.VARIABLES, **self.config.variables}))
        except (HclError, PolicyError, OSError) as error:
            way_out = f'mend it, or set "iam": "{OFF}" in {self.state / "config.json"}'
            raise StackError(f"cannot evaluate the IAM bindings of {directory}: {error}; {way_out}") from error
        return Callers(policy, self.identity, deployment.account_of)

    def _build(self) -> None:
        self._build_services()
        self._build_compute()
        self._build_workflows()
        self.crash = CrashSwitch(self.db, container_directories(self.state), self._functions.kill)
        self.emulators: list[Any] = [
            self.storage, self.pubsub, self.eventarc, self.secrets, self.slack, self.channels, self.telemetry,
            self.monitoring, self.dns,
            self.compute, self.tpu, self.cloudrun, self.kubernetes, self.gke, self.workflows, self.crash,
            Certificates(self.identity), Tokens(self.identity, _caller_of),
        ]  # fmt: skip

    def _build_services(self) -> None:
        self.pubsub = PubSubEmulator(
            self.db, self.clock, token=lambda audience, email: self.identity.token("OIDC", audience, EVENTS, email)
        )
        self.eventarc = EventarcRouter(self.pubsub, PROJECT, LOCATION, minimum_backoff_seconds=EVENT_RETRY_SECONDS)
        self.storage = StorageEmulator(
            self.db,
            self.state / "blobs",
            self.clock,
            on_change=self.eventarc.on_object_change,
            project=PROJECT,
            topics=self.pubsub,
        )
        self.secrets = SecretManagerEmulator(self.db, self.clock, PROJECT)
        self.slack = SlackSink(self.db, self.clock)
        self.channels = ChannelSink(self.db, self.clock)
        self.telemetry = TelemetryEmulator(self.db, self.clock, PROJECT)
        self.dns = DnsEmulator(
            self.db,
            self.clock,
            f"projects/{PROJECT}/managedZones/{deployment.ENDPOINT_ZONE}",
            deployment.ENDPOINT_DOMAIN,
        )

    def _build_compute(self) -> None:
        """The emulators that run containers, and the disks of TPU VMs and of clusters."""
        self.images = ImageStore(
            Path(self.config.images), self.state / "images", Path(sys.executable), self.config.bases
        )
        self.cloudrun = CloudRunEmulator(
            self._host("containers", self._platform_environment),
            access_secret=self.secrets.access,
            authorize=self._may_invoke,
            config=CloudRunConfig(**self.config.cloud_run),
        )
        self.compute = ComputeEmulator(
            self.db, self.clock, directory=self.state / "disks", config=ComputeConfig(**self.config.compute)
        )
        self.kubernetes = KubernetesEmulator(
            self._host("pods", self._platform_environment),
            authorize=self.identity.is_known,
            note=self._note_kubernetes,
            enter=self._enter_cluster,
            standing=(CLUSTER,),
            config=KubernetesConfig(**self.config.kubernetes),
            disks=self.compute.disks,
        )
        self.monitoring = MonitoringEmulator(
            self.cloudrun.counts, self.pubsub, deployment.dead_letters(), self.kubernetes.balanced
        )
        self.gke = GkeEmulator(self.db, self.clock, kubernetes=self.kubernetes, config=GkeConfig(**self.config.gke))
        self.tpu = TpuEmulator(
            self._host("vms", self._machine_environment),
            disks=self.compute.disks,
            token=lambda scope, account: self.identity.token("OAuth2", scope, _caller_of(account)),
            identity=lambda audience, account: self.identity.token("OIDC", audience, _caller_of(account), account),
            config=TpuConfig(**{"token_seconds": self.config.token_seconds - 1, **self.config.tpu}),
        )

    def _host(self, directory: str, environment: Callable[[str], Mapping[str, str]]) -> Host:
        return Host(self.db, self.clock, self.images, self.state / directory, environment)

    def _build_workflows(self) -> None:
        self.engine = Engine(
            self.db,
            clock=self.clock,
            token=partial(self.identity.token, caller=WORKFLOWS, email=deployment.account_of(WORKFLOWS)),
            authorize=self.identity.is_known,
            repeatable=lambda url: url.startswith(self.functions_url),  # every stage is idempotent
            # The lock of the state directory keeps other stacks away. Without /proc, a killed stack looks alive as soon
            # as any process has its id.
            takeover=True,
        )
        self.workflows = WorkflowsEmulator(self.engine)

    async def start(self) -> StackInfo:
        """Bind, deploy and start. Raises StackError when a port is taken."""
        self._server.before_start = self._deploy
        try:
            await self._server.start()
        except OSError as error:
            raise StackError(f"{error}; choose other ports with --http-port and --grpc-port") from error
        self._tell_functions()
        await self._wait_for_functions()
        self._console.begin(self.environment())
        self._tasks = [asyncio.create_task(self._schedule_sweeps()), asyncio.create_task(self._watch_functions())]
        return self.info()

    async def stop(self) -> None:
        """Stop every part. Container processes continue: they belong to the state directory, `down` ends them."""
        for task in self._tasks:
            task.cancel()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.db.close)
            stack.push_async_callback(asyncio.to_thread, self._functions.stop)
            stack.push_async_callback(self._server.stop)
            stack.push_async_callback(self._console.stop)

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
            console=self._console.url,
        )

    def environment(self, caller: str = "") -> dict[str, str]:
        """What the functions and the command line need to use this stack."""
        shared = deployment.environment(*self._server.addresses(caller), self._token(caller))
        shared["DROPFORGE_ACCESS_URL"] = f"{self.functions_url}access"
        shared["DROPFORGE_CONSOLE_URL"] = self._console.url
        # Secrets hold whole URLs of webhooks, which are the same for every caller.
        return {**shared, "WEBHOOK_EMULATOR_HOST": self._server.url, **self.config.settings}

    def kubeconfig(self) -> str:
        """For kubectl, with the token that the functions have."""
        server = f"https://{HOST}:{self.kubernetes.port_of(CLUSTER)}"
        return deployment.kubeconfig(server, self.kubernetes.authority_of(CLUSTER), self._token())

    def write_client_files(self) -> None:
        """The configurations of kubectl and gsutil, with the addresses of this start."""
        authority = self.state / "authority.pem"
        replace_file(authority, self._certificates.authority)
        replace_file(self.state / "boto", deployment.boto(self._server.tls_port, authority))
        replace_file(self.state / "kubeconfig", self.kubeconfig())

    def _token(self, caller: str = "") -> str:
        return self.identity.token("OAuth2", CLOUD_PLATFORM, caller)

    def _platform_environment(self, account: str) -> dict[str, str]:
        """The addresses of the APIs and of the metadata server, and a token, for the service account of a container.

        No machine of the stack has a GPU: the CPU stands in, which containers/train_trl refuses elsewhere.
        """
        caller = _caller_of(account)
        http, grpc = self._server.addresses(caller)
        metadata = http.removeprefix("http://")
        shared = deployment.libraries_environment(http, grpc, self._token(caller))
        return {**shared, "GCE_METADATA_HOST": metadata, "GCE_METADATA_IP": metadata, "DROPFORGE_CPU_STANDS_IN": "1"}

    def _machine_environment(self, account: str) -> dict[str, str]:
        """Like `_platform_environment`, for TPU machines, whose script publishes over REST."""
        environment = self._platform_environment(account)
        return {**environment, "CLOUDSDK_API_ENDPOINT_OVERRIDES_PUBSUB": f"{environment['STORAGE_EMULATOR_HOST']}/"}

    def _may_invoke(self, headers: Mapping[str, str]) -> bool:
        """Whether a request may reach a Cloud Run service: its token's account needs the permission on the project."""
        if self.recorder:
            self.recorder.note_endpoint(headers)
        if not self.identity.is_known(headers):
            return False
        account = self.callers.account(headers, "") if self.callers else None
        return account is None or account.may(INVOKE)

    def _enter_cluster(self, headers: Mapping[str, str]) -> None:
        if self.callers:
            self.callers.enter(headers, "")

    def _note_kubernetes(self, headers: Mapping[str, str], cluster: str, verb: str, resource: str) -> None:
        if self.recorder:
            self.recorder.note_kubernetes(headers, cluster, verb, resource)

    def _deploy(self) -> None:
        """Create what Terraform creates in a project. Idempotent; the ports are known, nothing is served yet."""
        self.engine.callback_base_url = self._server.url
        grpc_ports = self._server.grpc_ports
        kept = {caller: [port, grpc_ports[caller]] for caller, port in self._server.http_ports.items()}
        replace_file(self.state / "addresses.json", json.dumps(kept))
        for bucket in (SPECS_BUCKET, RUNS_BUCKET):
            self.storage.create_bucket(bucket)
        for topic in (REQUESTS, OPERATIONS, CONSOLE, JOB_EVENTS, RUN_EVENTS):
            self.pubsub.create_topic(f"projects/{PROJECT}/topics/{topic}")
        self.gke.ensure_cluster(CLUSTER)
        self.kubernetes.ensure_objects(CLUSTER, deployment.cluster_objects())
        self.secrets.set_secret(SLACK_SECRET, f"{self._server.url}/slack/services/T000/B000/local".encode())
        if not self.secrets.has_secret(ENDPOINT_KEY_SECRET):  # a restart keeps the key that the servers have read
            self.secrets.set_secret(ENDPOINT_KEY_SECRET, secrets.token_urlsafe(32).encode())
        for name, function, event_type, filters in deployment.triggers():
            dead = deployment.dead_letter(name)
            topic = f"projects/{PROJECT}/topics/{dead}"
            self.pubsub.create_topic(topic)
            self.pubsub.create_subscription(f"projects/{PROJECT}/subscriptions/{dead}", topic, DEAD_LETTERS)
            url, attempts = self.functions_url + function, DELIVERY_ATTEMPTS
            self.eventarc.ensure_trigger(Trigger(name, event_type, filters, url, topic, attempts))
        for workflow, file in ((WORKFLOW, "run"), (ROLLOUT_WORKFLOW, "rollout")):
            source = (ROOT / "workflows" / f"{file}.workflows.yaml").read_text()
            name = f"projects/{PROJECT}/locations/{LOCATION}/workflows/{workflow}"
            self.engine.deploy(name, source, env={"FUNCTIONS_URL": self.functions_url})

    def _tell_functions(self) -> None:
        records = self.recorder is not None
        self._functions.tell(self.environment(FUNCTIONS), _secret(self.state), self._invokers(), records=records)

    def _invokers(self) -> dict[str, list[str]] | None:
        """Who may call which function: callers of the platform, and functions; None if nothing is enforced."""
        if self.callers is None:
            return None
        functions = entry_points()
        callers = (EVENTS, SCHEDULER, WORKFLOWS, CONSOLE_ACCOUNT, *ROLES.values(), *functions)
        services = {name: deployment.function_service(name) for name in functions}
        return {
            name: [caller for caller in callers if self.callers.named(caller).may(INVOKE, service)]
            for name, service in services.items()
        }

    async def _wait_for_functions(self) -> None:
        """Return once the functions answer any request: the socket accepts connections before they can."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=START_SECONDS)) as session:
            try:
                async with session.get(self.functions_url):
                    return
            except (aiohttp.ClientError, TimeoutError) as error:
                raise StackError(f"the functions did not start; see {self.state / 'functions.log'}") from error

    async def _watch_functions(self) -> None:
        """Restart the functions' process when it ends, as the platform does."""
        while True:
            if (code := self._functions.poll()) is not None:
                log.error("the functions' process ended with exit code %s; restarting it", code)
                self._functions.begin()
                self._tell_functions()
            await asyncio.sleep(1)

    async def _schedule_sweeps(self) -> None:
        """Call the sweep regularly, as Cloud Scheduler does."""
        url, email = self.functions_url + "sweep", deployment.account_of(SCHEDULER)
        async with aiohttp.ClientSession() as session:
            while True:
                await asyncio.sleep(self.config.sweep_seconds)
                headers = {"Authorization": f"Bearer {self.identity.token('OIDC', url, SCHEDULER, email)}"}
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.post(url, json={}, headers=headers):
                        pass


async def serve(
    state: Path, http_port: int, grpc_port: int, functions: FunctionsProcess, console: ConsoleProcess
) -> None:
    """Run the stack until SIGTERM or SIGINT. Raises StackError."""
    stack = Stack(state, http_port, grpc_port, functions, console)
    info = await stack.start()
    addresses = (info.http, info.grpc, info.functions, info.console)
    replace_file(state / "ports.json", json.dumps([_port(address) for address in addresses]))
    stack.write_client_files()
    replace_file(state / "stack.json", json.dumps(asdict(info), indent=2))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    (state / "stack.json").unlink(missing_ok=True)
    await stack.stop()


def _caller_of(account: str) -> str:
    """The caller whose account a container has, by its e-mail or its name in a cluster; "" for another account."""
    return ROLES.get(account.partition("@")[0], "")


def _port(address: str) -> int:
    return int(address.rstrip("/").rsplit(":", 1)[1])


def _secret(state: Path) -> str:
    path = state / "identity"
    if not path.exists():
        replace_file(path, new_identity())
    return path.read_text()
