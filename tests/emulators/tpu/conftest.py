"""Emulators of Cloud TPU and Compute Engine, a fake repository with a small image, and clients."""

from __future__ import annotations

import json
import sys
import textwrap
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport
from tests.patience import PATIENCE_SECONDS, looks

from dropforge_local.base.clock import Clock, SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Emulator, Server
from dropforge_local.containers.images import ImageStore
from dropforge_local.containers.processes import end_all, find_members
from dropforge_local.emulators.compute import ComputeConfig, ComputeEmulator
from dropforge_local.emulators.kit.host import Host
from dropforge_local.emulators.tpu import TpuConfig, TpuEmulator

from ..clocks import HeldClock

PARENT = "projects/p1/locations/us-west1-c"
NODE = {"accelerator_type": "v5litepod-8", "runtime_version": "v2-alpha-tpuv5-lite"}
State = tpu_v2.Node.State
QueuedState = tpu_v2.QueuedResourceState.State
CONFIG = TpuConfig(
    create_seconds=0.1,
    delete_seconds=0.05,
    queue_seconds=0.05,
    grace_seconds=60.0,
    reboot_seconds=0.1,
    maintenance_seconds=0.1,
    minute_seconds=5.0,
)
NAP_PY = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: (print("polite", flush=True), sys.exit(75)))
    print("napping with", os.environ.get("GREETING"), "in", os.environ.get("WORK"), flush=True)
    if os.environ.get("WORK"):
        open(os.path.join(os.environ["WORK"], "trace"), "a").write("x")
    if os.environ.get("PORT"):
        import http.server
        address = (os.environ["HOST"], int(os.environ["PORT"]))
        http.server.HTTPServer(address, http.server.SimpleHTTPRequestHandler).serve_forever()
    time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 60)
    sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""
DOCKERFILE = (
    'FROM python:3.11\nWORKDIR /app\nCOPY containers/nap/main.py /app/\nENTRYPOINT ["python", "-S", "/app/main.py"]\n'
)
IMAGE = "us-west1-docker.pkg.dev/p1/dropforge/nap:v1"


def build(home: Path, clock: Clock | None = None) -> Sequence[Emulator]:
    db, clock = Database(home / "state.db"), clock or SystemClock()
    compute = ComputeEmulator(
        db, clock, directory=home / "disks", config=ComputeConfig(create_seconds=0.05, delete_seconds=0.05)
    )
    tpu = TpuEmulator(
        Host(
            db,
            clock,
            ImageStore(home / "repo", home / "images", Path(sys.executable)),
            home / "vms",
            lambda account: {"PLATFORM": "here"},
        ),
        disks=compute.disks,
        token=lambda scope, account: f"token-of-{scope.rsplit('/', 1)[1]}",
        config=CONFIG,
    )
    return [compute, tpu]


@dataclass
class Cloud:
    """The address of running emulators, and clients for them."""

    server: Server
    home: Path
    clock: HeldClock = field(default_factory=HeldClock)
    channels: list[grpc.Channel] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def tpu(self) -> tpu_v2.TpuClient:
        """A client over gRPC, as in the cloud."""
        self.channels.append(grpc.insecure_channel(self.server.grpc_address))
        return tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=self.channels[-1]))

    @property
    def rest(self) -> tpu_v2.TpuClient:
        options = {"api_endpoint": self.url}
        return tpu_v2.TpuClient(transport="rest", client_options=options, credentials=AnonymousCredentials())

    def create(self, node_id: str = "n1", script: str = "", **fields: Any) -> Any:
        metadata = {"startup-script": textwrap.dedent(script).lstrip(), **fields.pop("metadata", {})}
        node = {**NODE, **fields, "metadata": metadata if script else {}}
        return self.tpu.create_node(parent=PARENT, node=node, node_id=node_id)

    def ready(self, node_id: str = "n1", script: str = "", **fields: Any) -> tpu_v2.Node:
        return self.create(node_id, script, **fields).result(timeout=60)

    def node(self, node_id: str = "n1") -> tpu_v2.Node:
        return self.rest.get_node(name=f"{PARENT}/nodes/{node_id}")

    def delete(self, node_id: str = "n1") -> None:
        self.tpu.delete_node(name=f"{PARENT}/nodes/{node_id}").result(timeout=60)

    def queue(self, queued_id: str = "q1", node_id: str = "n1", **fields: Any) -> Any:
        node = {**NODE, **fields.pop("node", {})}
        spec = {"parent": PARENT, "node_id": node_id, "node": node}
        request = {
            "parent": PARENT,
            "queued_resource_id": queued_id,
            "request_id": fields.pop("request_id", ""),
            "queued_resource": {"tpu": {"node_spec": [spec]}, **fields},
        }
        return self.tpu.create_queued_resource(request=request)

    def queued(self, queued_id: str = "q1") -> tpu_v2.QueuedResource:
        return self.rest.get_queued_resource(name=f"{PARENT}/queuedResources/{queued_id}")

    def unqueue(self, queued_id: str = "q1", *, force: bool = True) -> Any:
        request = {"name": f"{PARENT}/queuedResources/{queued_id}", "force": force}
        return self.rest.delete_queued_resource(request=request)

    def wait_for_state(self, state: Any, queued_id: str = "q1") -> tpu_v2.QueuedResource:
        wait_for(lambda: self.queued(queued_id).state.state == state)
        return self.queued(queued_id)

    def disk(self, name: str) -> str:
        """Create a disk; return its full name."""
        place = "projects/p1/zones/us-west1-c"
        self._post(f"/compute/v1/{place}/disks", {"name": name, "sizeGb": "10"})
        url = f"{self.url}/compute/v1/{place}/disks/{name}"
        wait_for(lambda: json.load(urllib.request.urlopen(url, timeout=60))["status"] == "READY")
        return f"{place}/disks/{name}"

    def serial(self, node_id: str = "n1") -> str:
        with urllib.request.urlopen(f"{self.url}/_local/logs/{PARENT}/nodes/{node_id}", timeout=60) as answer:
            return str(answer.read().decode())

    def wait_for_line(self, text: str, node_id: str = "n1", count: int = 1) -> str:
        wait_for(lambda: self.serial(node_id).count(text) >= count, lambda: self.serial(node_id))
        return self.serial(node_id)

    def faults(self, **switches: Any) -> Any:
        return self._post("/_local/tpu/faults", switches)

    def processes(self) -> dict[Path, list[int]]:
        return find_members(self.home / "vms")

    def _post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


def wait_for(
    condition: Callable[[], bool], explain: Callable[[], object] = lambda: "", seconds: float = PATIENCE_SECONDS
) -> None:
    assert any(condition() for _ in looks(seconds)), explain()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "repo" / "containers" / "nap"
    folder.mkdir(parents=True)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    (folder / "main.py").write_text(textwrap.dedent(NAP_PY))
    yield tmp_path
    end_all(tmp_path / "vms", grace_seconds=0)


@pytest.fixture
def cloud(home: Path) -> Iterator[Cloud]:
    clock = HeldClock()
    with BackgroundServer(lambda: build(home, clock)) as server:
        cloud = Cloud(server, home, clock)
        yield cloud
        for channel in cloud.channels:
            channel.close()
