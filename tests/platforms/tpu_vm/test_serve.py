"""Serving on TPU VMs, stage by stage, with the emulated Cloud TPU: Google's clients, sockets, servers on machines."""

from __future__ import annotations

import io
import os
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.patience import until

from bench.cold_start import commit
from dropforge.base import names
from dropforge.base.clock import Clock, utc_now
from dropforge.cloud import tpu
from dropforge.platforms.serving import Deployment
from dropforge.platforms.tpu_vm import serve as tpu_vm
from dropforge.run.record import ResourceState, RunState
from dropforge.run.starts import read_start
from dropforge.run.store import RunStore
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.containers.images import ImageStore
from dropforge_local.containers.processes import end_all
from dropforge_local.emulators.compute import ComputeEmulator
from dropforge_local.emulators.kit.host import Host
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.emulators.tpu import TpuConfig, TpuEmulator

from ...deployments import clients, here
from ...stage_calls import deploy, sweep, teardown
from ..shared import (
    ME,
    environment,
    eventually,
    forget_clients,
    is_there,
    make_run,
    sweep_only,
    switch_faults,
    write_chips,
    write_servers,
    write_trainer,
)

ZONE = "us-west1-c"
SOON = {"startup_timeout": "1s"}
IMAGES = "us-west1-docker.pkg.dev/p1/dropforge"


@dataclass
class Cloud:
    """The emulated project, and the actions of a test in it."""

    url: str
    store: RunStore

    def run(self, image: str = "serve-noop", **serve: Any) -> str:
        """Store a run that has trained and whose model must now be served; return its id."""
        os.environ["DROPFORGE_SERVE_VLLM_TPU_IMAGE"] = f"{IMAGES}/{image}:test"
        here.cache_clear()
        return make_run(self.store, spec(**serve))

    def deploy(self, run: str) -> dict[str, Any]:
        """Call the deploy stage until its answer is no longer "call again"; return the last answer."""
        return eventually(lambda: deploy(run, ME))

    def clean_up(self, run: str) -> None:
        assert eventually(lambda: teardown(run, ME, "run", False))["status"] == "GONE"
        assert self.exists(run) == []
        assert self.store.ledger(run).remaining() == []

    def exists(self, run: str) -> list[str]:
        """Return the kinds of the run's resources in Cloud TPU, including resources that dropforge did not create."""
        parent = "projects/p1/locations/-"
        queued = clients.tpu().list_queued_resources(request={"parent": parent})
        resources = [("queued", resource.tpu.node_spec[0].node.labels) for resource in queued]
        resources += [("node", node.labels) for node in clients.tpu().list_nodes(request={"parent": parent})]
        return [kind for kind, labels in resources if labels.get(names.RUN_LABEL) == run]

    def faults(self, **switches: Any) -> None:
        switch_faults(self.url, "tpu", **switches)


def spec(**serve: Any) -> dict[str, Any]:
    return {
        "api_version": "dropforge/v1",
        "name": "noop",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "owner/data"},
        "target": {"type": "gke", "placements": [{"region": "us-central1"}]},
        "serve": {"type": "tpu_vm", "zone": ZONE, "ttl": "1h", **serve},
    }


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    home = tmp_path_factory.mktemp("tpu")
    write_servers(home)
    write_chips(home)
    write_trainer(home, "print('trained')")
    hosts: dict[str, str] = {}

    def build() -> list[Any]:
        db, clock = Database(home / "state.db"), SystemClock()
        storage, pubsub = StorageEmulator(db, home / "blobs", clock), PubSubEmulator(db, clock)
        storage.create_bucket("runs")
        pubsub.create_topic("projects/p1/topics/run-events")
        compute = ComputeEmulator(db, clock, directory=home / "disks")
        machines = TpuEmulator(
            Host(
                db,
                clock,
                ImageStore(home / "repo", home / "images", Path(sys.executable)),
                home / "vms",
                lambda account: hosts,
            ),
            disks=compute.disks,
            token=lambda scope, account: "good",
            config=TpuConfig(
                create_seconds=0.1,
                delete_seconds=0.05,
                queue_seconds=0.05,
                grace_seconds=2.0,
                reboot_seconds=0.1,
                maintenance_seconds=0.1,
                chips_per_zone=64,
            ),
        )
        return [storage, pubsub, compute, machines]

    with BackgroundServer(build) as server, patch.dict(os.environ):
        hosts["STORAGE_EMULATOR_HOST"] = server.url
        os.environ |= environment(server.url, server.grpc_address)
        forget_clients()
        yield Cloud(server.url, RunStore(clients.storage(), "runs"))
        clients.publisher().stop()
        clients.publisher().transport.close()
    forget_clients()
    end_all(home / "vms", grace_seconds=0)


@pytest.fixture
def cloud(running: Cloud) -> Iterator[Cloud]:
    with patch.object(tpu_vm, "LOOK_SECONDS", 0.1), patch.object(tpu_vm, "READY_WAIT_SECONDS", 1.0):
        yield running
    running.faults(stockout=[], quota={}, preempt_next=None, fail_next=[])


@pytest.mark.slow
def test_endpoints_answer_side_by_side_outlive_their_runs_and_are_swept(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_only("tpu_vm", monkeypatch)
    queued, taken = cloud.run(), cloud.run(queued=False, capacity="spot")
    assert [cloud.deploy(run)["status"] for run in (queued, taken)] == ["READY", "READY"]
    assert deploy(queued, ME)["status"] == "READY"  # the second call creates nothing
    assert (cloud.exists(queued), cloud.exists(taken)) == (["queued", "node"], ["node"])
    endpoints = [cloud.store.record(run).endpoint for run in (queued, taken)]
    assert [endpoint.service.rsplit("/", 2)[1:] for endpoint in endpoints if endpoint] == [
        ["queuedResources", f"df-{queued}-serve"],
        ["nodes", f"df-{taken}-serve"],
    ]
    node = clients.tpu().get_node(name=f"projects/p1/locations/{ZONE}/nodes/df-{queued}-serve")
    assert not node.network_config.enable_external_ips
    assert node.service_account.email == "server@p1.iam.gserviceaccount.com"
    assert list(node.tags) == [tpu.SERVER_TAG]

    # The endpoint outlives the end of the attempt and of the run.
    for scope in (1, "run"):
        assert eventually(partial(teardown, queued, ME, scope, True))["status"] == "GONE"
    cloud.store.update(queued, lambda record: record.entered(RunState.SUCCEEDED, utc_now()))
    assert sweep()["deleted"] == []  # they have not expired
    assert [is_there(cloud.store, run) for run in (queued, taken)] == [True, True]
    for entry in cloud.store.ledger(queued).entries:
        # The ledger is wrong here; the sweep trusts the cloud's list.
        cloud.store.note(queued, entry.name, ResourceState.GONE)
    monkeypatch.setattr(Clock, "now", lambda _: utc_now() + timedelta(days=2))
    assert len(sweep()["deleted"]) == 3  # a queued resource and two nodes
    assert [*cloud.exists(queued), *cloud.exists(taken)] == []
    assert [is_there(cloud.store, run) for run in (queued, taken)] == [False, False]
    assert cloud.store.ledger(queued).remaining() == []
    ended = cloud.store.record(queued).endpoint
    assert ended
    assert ended.ended


@pytest.mark.parametrize(
    ("image", "serve", "faults", "expected", "text"),
    [
        ("serve-missing", {}, {}, "config", "serve-missing:test does not exist"),
        pytest.param(*("serve-crash", {}, {}, "code", "\nthe weights do not fit"), marks=pytest.mark.slow),
        pytest.param(
            *("serve-deaf", {"startup_timeout": "9s"}, {}, "code", "runs, but nothing answers at http://"),
            marks=pytest.mark.slow,
        ),
        # The queue time and the start timeout end at the same moment: whichever check runs first reports it.
        ("serve-noop", SOON, {"stockout": [ZONE]}, "stockout", "no resources became available|WAITING_FOR_RESOURCES"),
        ("serve-noop", {"queued": False}, {"stockout": [ZONE]}, "stockout", "no more capacity in the zone"),
        ("serve-noop", {}, {"quota": {ZONE: 4}}, "quota", "Limit: 4 in zone"),
        ("serve-deaf", {"capacity": "spot"}, {"preempt_next": {"after_seconds": 0.1}}, "preempted", "was preempted"),
    ],
    ids=["no-image", "crash", "deaf", "stockout-in-queue", "stockout-at-once", "quota", "preempted"],
)
def test_the_reason_that_an_endpoint_does_not_answer_is_reported(
    cloud: Cloud, image: str, serve: dict[str, Any], faults: dict[str, Any], expected: str, text: str
) -> None:
    cloud.faults(**faults)
    run = cloud.run(image, **serve)
    answer = cloud.deploy(run)
    assert answer["status"] == "FAILED", answer
    assert answer["error"]["error_class"] == expected, answer
    assert re.search(text, answer["error"]["message"]), answer
    assert "training" not in answer["error"]["hint"]
    assert answer["error"]["hint"]
    cloud.clean_up(run)


def test_a_machine_keeps_what_xla_compiles(cloud: Cloud, tmp_path: Path) -> None:
    """The metadata of the machine and the startup script give the container its image, directory and type of TPU."""
    run, client = cloud.run("serve-chips"), clients.storage()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    commit(client, "runs", run, tmp_path, cloud.store.key(run))
    deploy(run, ME)
    (archive,) = until(lambda: list(client.list_blobs("runs", prefix=f"caches/{run}/")))
    with zipfile.ZipFile(io.BytesIO(archive.download_as_bytes())) as programs:
        assert set(programs.namelist()) == {"xla/jit_step-0a-cache", "xla/jit_sample-0b-cache"}
    assert "compiled code" in read_start(client, "runs", run)
    cloud.clean_up(run)


def test_a_project_without_tpus_is_swept(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sweep logs the missing API once."""
    sweep_only("tpu_vm", monkeypatch)
    monkeypatch.delenv("DROPFORGE_SERVE_VLLM_TPU_IMAGE", raising=False)
    here.cache_clear()
    message = "Cloud TPU API has not been used in project p1 before or it is disabled."
    fault = {"method": "list_queued_resources", "status": "PERMISSION_DENIED", "message": message, "count": 2}
    cloud.faults(fail_next=fault)
    assert [sweep()["deleted"], sweep()["deleted"]] == [[], []]
    assert capsys.readouterr().err.count(message) == 1


def test_a_name_that_another_owner_uses_is_refused(cloud: Cloud) -> None:
    run = cloud.run()
    other = Deployment("other-0123456789ab", cloud.store.spec(run), here().settings, utc_now())
    with patch.object(names, "endpoint_name", lambda _: f"df-{run}-serve"):
        assert tpu.ensure(here().cloud, tpu_vm.machine(other))
    answer = cloud.deploy(run)
    assert answer["error"]["error_class"] == "config"
    assert other.run in answer["error"]["message"]
    assert eventually(lambda: teardown(run, ME, "run", False))["status"] == "GONE"
