"""Target `tpu_vm` with the emulated Cloud TPU and Compute Engine, whose machines run the startup script."""

from __future__ import annotations

import json
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from google.cloud import tpu_v2
from tests.patience import until

from dropforge.base import names
from dropforge.base.errors import CloudError, ErrorClass
from dropforge.cloud.disks import DISK, ensure_disk
from dropforge.cloud.resource import Resource
from dropforge.cloud.tpu import NODE, QUEUED
from dropforge.platforms.tpu_vm import train as tpu_vm
from dropforge.platforms.tpu_vm.train import STARTUP_SCRIPT, TpuVms, disk_name, node_name, queued_name
from dropforge.platforms.training import Launch, Phase, Status, Waits
from dropforge.spec import parse_spec
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Emulator
from dropforge_local.containers.images import ImageStore
from dropforge_local.containers.processes import end_all
from dropforge_local.emulators.compute import ComputeConfig, ComputeEmulator
from dropforge_local.emulators.kit.host import Host
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.emulators.secretmanager import SecretManagerEmulator
from dropforge_local.emulators.storage import StorageEmulator
from dropforge_local.emulators.tpu import TpuConfig, TpuEmulator

from ...deployments import Bound, clients, present, settings_with
from ..shared import Stages, contains, forget_clients, switch_faults, write_trainer

# The first word of the run id says how the container behaves.
MAIN_PY = """
    import os, signal, sys, time
    behaviour = os.environ["DROPFORGE_RUN"].split("-")[0]
    assert os.path.isdir(os.environ["DROPFORGE_WORK_DIRECTORY"]), "the data disk is not there"
    code = 75 if behaviour == "polite" else 143
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    if behaviour == "token" and "projects/p1/secrets/hf/versions/latest" not in os.environ["DROPFORGE_SECRETS"]:
        sys.exit(70)
    if behaviour.startswith("exit"):
        sys.exit(int(behaviour.removeprefix("exit")))
    if behaviour not in ("succeed", "token"):
        time.sleep(600)
"""
SETTINGS = replace(
    settings_with(),
    project="p1",
    runs_bucket="runs",
    job_events_topic="job-events",
    trainer_service_account="trainer@p1.iam.gserviceaccount.com",
    train_maxtext_image="us-west1-docker.pkg.dev/p1/dropforge/train-x:v1",
    provision_deadline_seconds=1800,
)
ZONE = "us-west1-c"
TARGET = Bound(TpuVms())
STAGES = Stages(TARGET)


def launch(behave: str, secrets: dict[str, str] | None = None, **target: Any) -> Launch:
    spec = {
        "api_version": "dropforge/v1",
        "name": "n",
        "model": {"source": "owner/tiny-1m"},
        "dataset": {"source": "owner/data"},
        "training": {"adapter": {"type": "none"}},
        "target": {"type": "tpu_vm", "placements": [{"zone": ZONE}], **target},
        "serve": None,
        "secrets": secrets or {},
    }
    run = f"{behave}-{uuid.uuid4().hex[:12]}"
    deadline = datetime.now(UTC) + timedelta(seconds=600)
    return Launch(run, 1, 0, parse_spec(json.dumps(spec).encode()), SETTINGS, deadline, 600, key="")


@dataclass
class Cloud:
    """The emulators and their switches."""

    url: str
    home: Path
    live: Callable[[], list[str]]

    def faults(self, emulator: str, **switches: Any) -> None:
        switch_faults(self.url, emulator, **switches)

    def serial(self, attempt: Launch) -> str:
        with urllib.request.urlopen(f"{self.url}/_local/logs/{node_name(attempt)}", timeout=60) as answer:
            return str(answer.read().decode())


def build(home: Path, hosts: dict[str, str], emulators: list[Any]) -> Sequence[Emulator]:
    db, clock = Database(home / "state.db"), SystemClock()
    storage, pubsub = StorageEmulator(db, home / "blobs", clock), PubSubEmulator(db, clock)
    storage.create_bucket("runs")
    pubsub.create_topic("projects/p1/topics/job-events")
    secrets = SecretManagerEmulator(db, clock, "p1")
    secrets.set_secret("hf", b"secret")
    compute = ComputeEmulator(
        db, clock, directory=home / "disks", config=ComputeConfig(create_seconds=0.05, delete_seconds=0.05)
    )
    tpu = TpuEmulator(
        Host(
            db,
            clock,
            ImageStore(home / "repo", home / "images", Path(sys.executable)),
            home / "vms",
            lambda account: hosts,
        ),
        disks=compute.disks,
        token=lambda scope, account: "token",
        config=TpuConfig(
            create_seconds=0.1,
            delete_seconds=0.05,
            queue_seconds=0.05,
            grace_seconds=5.0,
            reboot_seconds=0.1,
            maintenance_seconds=0.1,
        ),
    )
    emulators += [compute, tpu]
    return [storage, pubsub, secrets, compute, tpu]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    home = tmp_path_factory.mktemp("tpu")
    write_trainer(home, MAIN_PY)
    hosts: dict[str, str] = {}
    emulators: list[Any] = []
    background = BackgroundServer(lambda: build(home, hosts, emulators))

    async def live() -> list[str]:
        return [name for emulator in emulators for name in emulator.live()]

    with background as server, pytest.MonkeyPatch.context() as environment:
        names = ("STORAGE_EMULATOR_HOST", "SECRET_MANAGER_EMULATOR_HOST", "CLOUDSDK_API_ENDPOINT_OVERRIDES_PUBSUB")
        hosts.update(dict.fromkeys(names, server.url))
        for name in ("STORAGE_EMULATOR_HOST", "TPU_EMULATOR_HOST", "COMPUTE_EMULATOR_HOST"):
            environment.setenv(name, server.url)
        environment.setenv("DROPFORGE_PROJECT", "p1")
        forget_clients()
        yield Cloud(server.url, home, lambda: background.call(live()))
        forget_clients()
    end_all(home / "vms", grace_seconds=0)


@pytest.fixture
def cloud(running: Cloud) -> Iterator[Cloud]:
    yield running
    running.faults("tpu", stockout=[], quota={}, preempt_next=None, fail_next=[])
    running.faults("compute", quota={}, fail_next=[])
    assert running.live() == []


def _name_of(function: Callable[[Launch], str], attempt: Launch, _: Launch) -> str:
    return function(attempt)


def test_an_attempt_from_its_request_to_the_deletion_of_its_resources(cloud: Cloud) -> None:
    attempt = launch("token", {"HF_TOKEN": "hf"})
    STAGES.provision(attempt)
    assert TARGET.provision(attempt) is None  # the reply was lost
    disk, queued, node = TARGET.resources(attempt)
    assert [disk.kind, queued.kind, node.kind] == [DISK, QUEUED, NODE]
    status = STAGES.ended(attempt)
    assert (status.phase, status.exit_code) == (Phase.SUCCEEDED, 0), cloud.serial(attempt)
    stored_resource = clients.tpu().get_queued_resource(name=queued.name)
    stored = json.loads(tpu_v2.QueuedResource.to_json(stored_resource, use_integers_for_enums=False))
    assert contains(stored, queued.request["queuedResource"])
    stored_node = clients.tpu().get_node(name=node.name)
    assert not stored_node.network_config.enable_external_ips
    assert stored_node.service_account.email == SETTINGS.trainer_service_account
    STAGES.tear_down(TARGET.resources(attempt))
    assert TARGET.inspect(attempt).phase is Phase.GONE
    assert all(TARGET.teardown(resource.kind, resource.name) for resource in (disk, queued, node))


def test_an_attempt_without_the_queue(cloud: Cloud) -> None:
    attempt = launch("succeed", queued=False, placements=[{"zone": ZONE, "capacity": "spot"}])
    assert TARGET.provision(attempt) == Waits(f"the node {node_name(attempt)} is being created")
    STAGES.provision(attempt)
    assert clients.tpu().get_node(name=node_name(attempt)).scheduling_config.spot
    assert STAGES.ended(attempt).phase is Phase.SUCCEEDED
    STAGES.tear_down(TARGET.resources(attempt))


@pytest.mark.parametrize(
    ("behave", "expected", "code"),
    [
        ("exit65", ErrorClass.DATA, 65),
        ("exit1", ErrorClass.CODE, 1),
    ],
)
def test_the_exit_code_gives_the_phase_and_the_error_class(
    cloud: Cloud, behave: str, expected: ErrorClass, code: int
) -> None:
    attempt = launch(behave)
    STAGES.provision(attempt)
    status = STAGES.ended(attempt)
    assert (status.phase, status.error_class, status.exit_code) == (Phase.FAILED, expected, code)
    assert status.ended is not None
    STAGES.tear_down(TARGET.resources(attempt))


def test_capacity_that_does_not_arrive_in_time_is_a_stockout(cloud: Cloud) -> None:
    cloud.faults("tpu", stockout=[ZONE])
    attempt = launch("succeed", placements=[{"zone": ZONE, "max_wait": "2s"}])
    STAGES.provision(attempt)
    waiting = STAGES.wait_for(attempt, Phase.PENDING)
    assert waiting.error_class is ErrorClass.STOCKOUT
    status = STAGES.ended(attempt)
    assert (status.error_class, "expired" in status.message) == (ErrorClass.STOCKOUT, True)
    STAGES.tear_down(TARGET.resources(attempt))


def test_a_refusal_for_lack_of_capacity_is_a_stockout(cloud: Cloud) -> None:
    cloud.faults("tpu", stockout=[ZONE])
    attempt = launch("succeed", queued=False)
    with pytest.raises(CloudError, match="There is no more capacity") as refusal:
        STAGES.provision(attempt)
    assert refusal.value.error_class is ErrorClass.STOCKOUT
    STAGES.tear_down(TARGET.resources(attempt))


@pytest.mark.parametrize("queued", [True, False])
def test_missing_quota_has_the_class_quota(cloud: Cloud, queued: bool) -> None:
    cloud.faults("tpu", quota={ZONE: 4})
    attempt = launch("succeed", queued=queued)
    if queued:
        STAGES.provision(attempt)
        outcome: CloudError | Status = STAGES.ended(attempt)
    else:
        with pytest.raises(CloudError, match="has been exceeded") as refusal:
            STAGES.provision(attempt)
        outcome = refusal.value
    assert outcome.error_class is ErrorClass.QUOTA
    STAGES.tear_down(TARGET.resources(attempt))


def test_a_disk_above_the_quota_has_the_class_quota(cloud: Cloud) -> None:
    cloud.faults("compute", quota={ZONE: 100})
    attempt = launch("succeed")
    with pytest.raises(CloudError, match="DISKS_TOTAL_GB") as refusal:
        STAGES.provision(attempt)
    assert refusal.value.error_class is ErrorClass.QUOTA
    STAGES.tear_down(TARGET.resources(attempt))


def test_a_disk_in_use_is_not_gone_yet(cloud: Cloud) -> None:
    attempt = launch("succeed")
    disk = TARGET.resources(attempt)[0]
    until(lambda: ensure_disk(present(), disk.name, disk.request), bool)
    message = f"The disk resource '{disk.name}' is already being used by 'projects/t1/zones/z/instances/t1v-n-1-w-0'"
    refusal = {"method": "delete_disk", "status": "INVALID_ARGUMENT", "message": message}
    cloud.faults("compute", fail_next=refusal)
    assert not TARGET.teardown(disk.kind, disk.name)
    cloud.faults("compute", fail_next={**refusal, "message": "Invalid value for field 'disk'"})
    with pytest.raises(CloudError, match="Invalid value"):
        TARGET.teardown(disk.kind, disk.name)
    STAGES.tear_down([disk])


@pytest.mark.parametrize("queued", [True, False])
def test_what_another_call_has_created_meanwhile_is_no_error(cloud: Cloud, queued: bool) -> None:
    method = "create_queued_resource" if queued else "create_node"
    cloud.faults("tpu", fail_next={"method": method, "status": "ALREADY_EXISTS", "after_effect": True})
    attempt = launch("succeed", queued=queued)
    STAGES.provision(attempt)
    assert STAGES.ended(attempt).phase is Phase.SUCCEEDED
    STAGES.tear_down(TARGET.resources(attempt))


@pytest.mark.parametrize("emulator", ["compute", "tpu"])
def test_after_a_lost_answer_nothing_is_created_twice(cloud: Cloud, emulator: str) -> None:
    method = {"compute": "insert_disk", "tpu": "create_queued_resource"}[emulator]
    cloud.faults(emulator, fail_next={"method": method, "status": "UNAVAILABLE", "after_effect": True})
    attempt = launch("succeed")
    with pytest.raises(CloudError) as failure:
        STAGES.provision(attempt)
    assert failure.value.error_class is ErrorClass.TRANSIENT
    STAGES.provision(attempt)
    assert STAGES.ended(attempt).phase is Phase.SUCCEEDED
    STAGES.tear_down(TARGET.resources(attempt))


def test_preempted_while_training(cloud: Cloud) -> None:
    attempt = launch("polite", placements=[{"zone": ZONE, "capacity": "spot"}])
    STAGES.provision(attempt)
    until(lambda: cloud.serial(attempt), lambda text: "Digest" in text or "sha256:" in text)
    STAGES.wait_for(attempt, Phase.RUNNING)
    cloud.faults("tpu", preempt=node_name(attempt))
    assert STAGES.ended(attempt).error_class is ErrorClass.PREEMPTED
    STAGES.tear_down(TARGET.resources(attempt))


def test_preempted_before_the_script_could_do_anything(cloud: Cloud) -> None:
    cloud.faults("tpu", preempt_next={"after_seconds": 0})
    attempt = launch("sleep", placements=[{"zone": ZONE, "capacity": "spot"}])
    STAGES.provision(attempt)
    status = STAGES.ended(attempt)
    assert (status.phase, status.error_class) == (Phase.FAILED, ErrorClass.PREEMPTED)
    STAGES.tear_down(TARGET.resources(attempt))


@pytest.mark.parametrize(
    ("code", "written", "expected"),
    [
        (143, "infrastructure", ErrorClass.PREEMPTED),
        (137, "infrastructure", ErrorClass.PREEMPTED),
        (137, "out_of_memory", ErrorClass.OUT_OF_MEMORY),
        (1, "code", ErrorClass.CODE),
    ],
)
def test_a_preemption_explains_a_container_that_was_killed(
    cloud: Cloud, code: int, written: str, expected: ErrorClass
) -> None:
    """The script may not know that the machine is taken away."""
    cloud.faults("tpu", preempt_next={"after_seconds": 0})
    attempt = launch("sleep", placements=[{"zone": ZONE, "capacity": "spot"}])
    STAGES.provision(attempt)
    assert STAGES.ended(attempt).error_class is ErrorClass.PREEMPTED
    now = datetime.now(UTC).isoformat()
    status = {"run": attempt.run, "attempt": 1, "time": now, "exit_code": code, "error_class": written, "message": "x"}
    name = names.machine_object(attempt.run, 1, "status.json")
    clients.storage().bucket("runs").blob(name).upload_from_string(json.dumps(status))
    seen = STAGES.ended(attempt)
    assert (seen.error_class, seen.exit_code) == (expected, code)
    STAGES.tear_down(TARGET.resources(attempt))


def test_a_machine_that_a_user_deletes_is_reported(cloud: Cloud) -> None:
    attempt = launch("sleep")
    STAGES.provision(attempt)
    STAGES.wait_for(attempt, Phase.RUNNING)
    clients.tpu().delete_node(name=node_name(attempt))
    status = until(lambda: TARGET.inspect(attempt), lambda status: status.phase is Phase.FAILED)
    assert status.error_class is ErrorClass.INFRASTRUCTURE
    STAGES.tear_down(TARGET.resources(attempt))


@pytest.mark.parametrize("queued", [True, False])
def test_resources_of_another_run_are_not_touched(cloud: Cloud, queued: bool) -> None:
    attempt = launch("sleep", queued=queued)
    STAGES.provision(attempt)
    # Names are made from the run id, so only the label shows that the resource belongs to another run.
    stranger = replace(attempt, run=attempt.run[::-1])
    with pytest.MonkeyPatch.context() as patch:
        for function in ("node_name", "queued_name", "disk_name"):
            patch.setattr(
                f"dropforge.platforms.tpu_vm.train.{function}", partial(_name_of, getattr(tpu_vm, function), attempt)
            )
        with pytest.raises(CloudError, match="exists and belongs to") as refusal:
            TARGET.provision(stranger)
    assert refusal.value.error_class is ErrorClass.CONFIG
    STAGES.tear_down(TARGET.resources(attempt))


def test_the_request_is_exact() -> None:
    attempt = launch(
        "n",
        {"HF_TOKEN": "hf:3"},
        accelerator_type="v6e-4",
        data_disk_gib=300,
        placements=[{"zone": "us-east5-b", "capacity": "reservation", "reservation": "mine", "max_wait": "5m"}],
    )
    disk, queued, node = TARGET.resources(attempt)
    name = f"df-{attempt.run}-a1"
    assert (disk.name, queued.name, node.name) == (disk_name(attempt), queued_name(attempt), node_name(attempt))
    assert disk.request["disk"]["type"] == "zones/us-east5-b/diskTypes/hyperdisk-balanced"
    queued_resource = queued.request["queuedResource"]
    assert queued_resource["reservationName"] == "projects/p1/locations/us-east5-b/reservations/mine"
    assert queued_resource["queueingPolicy"] == {"validUntilDuration": "300s"}
    [spec] = queued_resource["tpu"]["nodeSpec"]
    assert (spec["parent"], spec["nodeId"]) == ("projects/p1/locations/us-east5-b", name)
    metadata = spec["node"].pop("metadata")
    assert spec["node"] == {
        "acceleratorType": "v6e-4",
        "runtimeVersion": "v2-alpha-tpuv6e",
        "networkConfig": {
            "network": "projects/p1/global/networks/default",
            "subnetwork": "projects/p1/regions/us-east5/subnetworks/default",
            "enableExternalIps": False,
        },
        "serviceAccount": {
            "email": "trainer@p1.iam.gserviceaccount.com",
            "scope": ["https://www.googleapis.com/auth/cloud-platform"],
        },
        "dataDisks": [{"sourceDisk": f"projects/p1/zones/us-east5-b/disks/{name}", "mode": "READ_WRITE"}],
        "labels": {
            "managed-by": "dropforge",
            "dropforge-run": attempt.run,
            "dropforge-attempt": "1",
            "dropforge-deployment": SETTINGS.deployment,
        },
    }
    assert metadata["startup-script"] == STARTUP_SCRIPT.read_text()
    assert 'DROPFORGE_SECRETS={"HF_TOKEN": "projects/p1/secrets/hf/versions/3"}' in metadata["dropforge-env"].split(
        "\n"
    )
    documented = STARTUP_SCRIPT.read_text().split("set -Eeuo")[0]
    assert {key for key in metadata if f"#   {key} " in documented} == set(metadata) - {"startup-script"}
    tpu_v2.CreateQueuedResourceRequest.from_json(json.dumps(queued.request))  # raises for an unknown field


def test_every_attempt_and_every_request_has_its_own_name() -> None:
    first = launch("n")
    second = replace(first, attempt=2)
    names: set[str] = set()
    ids: set[str] = set()
    for attempt in (first, second, launch("n")):
        resources: list[Resource] = TARGET.resources(attempt)
        names.update(resource.name for resource in resources)
        ids.update(r.request["requestId"] for r in resources if "requestId" in r.request)
    assert (len(names), len(ids)) == (9, 6)
    assert TARGET.resources(first) == TARGET.resources(first)
