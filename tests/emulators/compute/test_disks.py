"""Disks with Google's own client and plain HTTP: operations, refusals, idempotency, restarts."""

from __future__ import annotations

import json
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google.api_core.exceptions as refused
import pytest
from google.auth.credentials import AnonymousCredentials
from tests.patience import PATIENCE_SECONDS

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.compute import ComputeConfig, ComputeEmulator

PLACE = {"project": "p1", "zone": "us-west1-c"}
PARENT = "projects/p1/zones/us-west1-c"


def clients() -> Any:
    """Google's clients, imported late: they take longer to import than all modules that pytest collects."""
    from google.cloud import compute_v1

    return compute_v1


@dataclass
class Compute:
    url: str
    emulator: ComputeEmulator
    background: BackgroundServer

    @property
    def client(self) -> Any:
        return clients().DisksClient(credentials=AnonymousCredentials(), client_options={"api_endpoint": self.url})

    def insert(self, name: str, request_id: str = "", zone: str = PLACE["zone"], **fields: Any) -> Any:
        disk = {"name": name, "size_gb": 20, "type_": f"zones/{zone}/diskTypes/pd-balanced", **fields}
        request = {**PLACE, "zone": zone, "disk_resource": disk, **({"request_id": request_id} if request_id else {})}
        return self.client.insert(request=request, retry=None)

    def finish(self, operation: Any) -> None:
        """Wait for an operation. DisksClient's own operations client would call Google's endpoint."""
        options = {"api_endpoint": self.url}
        client = clients().ZoneOperationsClient(credentials=AnonymousCredentials(), client_options=options)
        done = client.wait(operation=operation.name, **PLACE)
        assert (done.status, done.error.errors) == (clients().Operation.Status.DONE, [])

    def faults(self, **switches: Any) -> None:
        request = urllib.request.Request(f"{self.url}/_local/compute/faults", json.dumps(switches).encode())
        with urllib.request.urlopen(request, timeout=60):
            pass


def build(home: Path, made: list[ComputeEmulator]) -> list[ComputeEmulator]:
    db = Database(home / "state.db")
    config = ComputeConfig(create_seconds=0.1, delete_seconds=0.1)
    made.append(ComputeEmulator(db, SystemClock(), directory=home / "disks", config=config))
    return made


@pytest.fixture
def compute(tmp_path: Path) -> Iterator[Compute]:
    made: list[ComputeEmulator] = []
    background = BackgroundServer(lambda: build(tmp_path, made))
    with background as server:
        yield Compute(server.url, made[0], background)


def on_loop(compute: Compute, call: Any, *arguments: Any) -> Any:
    """Call a function on the server's thread, which owns the SQLite connection."""

    async def run() -> Any:
        return call(*arguments)

    return compute.background.call(run())


def test_a_disk_is_created_and_deleted(compute: Compute) -> None:
    compute.finish(compute.insert("d1", labels={"dropforge-run": "r1"}))
    disk = compute.client.get(disk="d1", **PLACE)
    assert (disk.status, disk.size_gb, dict(disk.labels)) == ("READY", 20, {"dropforge-run": "r1"})
    assert disk.type_.endswith("zones/us-west1-c/diskTypes/pd-balanced")
    assert [disk.name for disk in compute.client.list(**PLACE)] == ["d1"]
    compute.finish(compute.client.delete(disk="d1", **PLACE))
    with pytest.raises(refused.NotFound, match=f"The resource '{PARENT}/disks/d1' was not found"):
        compute.client.get(disk="d1", **PLACE)


def test_the_disks_of_all_zones_are_listed_by_label_and_page(compute: Compute) -> None:
    owned = {"managed-by": "dropforge"}
    for name, zone, labels in (("d1", "us-west1-c", owned), ("d2", "us-west1-c", {}), ("d3", "us-west4-a", owned)):
        compute.insert(name, zone=zone, labels=labels)
    request: dict[str, Any] = {"project": "p1", "filter": "labels.managed-by=dropforge", "max_results": 1}
    pages = [dict(page.items) for page in compute.client.aggregated_list(request).pages]
    listed = [{zone: [disk.name for disk in scoped.disks] for zone, scoped in page.items()} for page in pages]
    assert listed == [{"zones/us-west1-c": ["d1"]}, {"zones/us-west4-a": ["d3"]}]
    with pytest.raises(refused.GoogleAPICallError, match=r"by labels\.KEY=VALUE only"):
        list(compute.client.aggregated_list({**request, "filter": "sizeGb>10"}))


def test_a_repeated_request_creates_a_single_disk(compute: Compute) -> None:
    request_id = str(uuid.uuid4())
    first = compute.insert("d1", request_id)
    assert compute.insert("d1", request_id).name == first.name
    with pytest.raises(refused.Conflict, match="already exists"):
        compute.insert("d1", str(uuid.uuid4()))


def test_a_disk_in_use_is_not_deleted(compute: Compute) -> None:
    compute.finish(compute.insert("d1"))
    node = "projects/p1/locations/us-west1-c/nodes/n1"
    on_loop(compute, compute.emulator.disks.attach, f"{PARENT}/disks/d1", node)
    assert list(compute.client.get(disk="d1", **PLACE).users) == [node]
    with pytest.raises(refused.BadRequest, match=f"already being used by '{node}'"):
        compute.client.delete(disk="d1", **PLACE)
    on_loop(compute, compute.emulator.disks.detach, node)
    compute.finish(compute.client.delete(disk="d1", **PLACE))


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"name": "D1"}, refused.BadRequest, "resource.name"),
        ({"size_gb": 1}, refused.BadRequest, "Expected 10 to 65536"),
        ({"type_": "zones/us-west1-c/diskTypes/floppy"}, refused.BadRequest, "pd-balanced"),
        ({"type_": "zones/us-east1-d/diskTypes/pd-ssd"}, refused.BadRequest, "zones/us-west1-c/diskTypes"),
        ({"labels": {"Run": "1"}}, refused.BadRequest, "labels.Run"),
        ({"source_image": "projects/debian-cloud/global/images/d"}, refused.GoogleAPICallError, "sourceImage"),
    ],
)
def test_bad_disks_are_refused(compute: Compute, fields: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        compute.insert(fields.pop("name", "d1"), **fields)
    assert not list(compute.client.list(**PLACE))


def test_quota_and_lost_answers(compute: Compute) -> None:
    compute.faults(quota={"us-west1-c": 30})
    compute.finish(compute.insert("d1"))
    with pytest.raises(refused.Forbidden, match="Quota 'DISKS_TOTAL_GB' exceeded"):
        compute.insert("d2")
    compute.faults(quota={}, fail_next={"method": "insert_disk", "after_effect": True})
    with pytest.raises(refused.ServiceUnavailable):
        compute.insert("d2")
    assert compute.client.get(disk="d2", **PLACE).name == "d2"


def test_the_next_stack_finishes_a_begun_operation(tmp_path: Path) -> None:
    with BackgroundServer(lambda: build(tmp_path, [])) as server:
        urllib.request.urlopen(f"{server.url}/compute/v1/{PARENT}/disks", b'{"name": "d1"}', timeout=60).close()
    db = Database(tmp_path / "state.db")  # restore the state right after the request
    db.connection.execute("UPDATE compute_disks SET body = json_set(body, '$.status', 'CREATING')")
    db.connection.execute("UPDATE operations SET ended = NULL, response = NULL")
    db.close()
    with BackgroundServer(lambda: build(tmp_path, [])) as server:
        options = {"api_endpoint": server.url}
        client = clients().DisksClient(credentials=AnonymousCredentials(), client_options=options)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while client.get(disk="d1", **PLACE).status != "READY":
            assert time.monotonic() < deadline
            time.sleep(0.02)
