"""Cloud TPU with Google's own client over gRPC and REST, and with gcloud: nodes, queued resources, refusals, faults."""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import google.api_core.exceptions as refused
import pytest
from google.cloud import tpu_v2
from google.cloud.location import locations_pb2

from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.tpu import TpuEmulator

from ...gcloud import RunGcloud
from .conftest import NODE, PARENT, Cloud, QueuedState, State, build, wait_for


def test_a_node_is_created_and_deleted(cloud: Cloud) -> None:
    with cloud.clock.hold():
        operation = cloud.create(labels={"dropforge-run": "r1"}, network_config={"enable_external_ips": False})
        assert cloud.node().state == State.CREATING
    metadata = operation.metadata
    assert (metadata.verb, metadata.target) == ("create", f"{PARENT}/nodes/n1")
    node = operation.result(timeout=60)
    assert (node.state, node.health, dict(node.labels)) == (
        State.READY,
        tpu_v2.Node.Health.HEALTHY,
        {"dropforge-run": "r1"},
    )
    assert node.accelerator_config.topology == "2x4"
    assert node.network_endpoints[0].ip_address.startswith("127.")
    assert [node.name for node in cloud.rest.list_nodes(parent="projects/p1/locations/-")] == [node.name]
    cloud.delete()
    with pytest.raises(refused.NotFound, match=f"Resource '{node.name}' was not found"):
        cloud.node()
    assert not cloud.processes()


def test_rest_and_grpc_answer_the_same(cloud: Cloud) -> None:
    operation = cloud.rest.create_node(parent=PARENT, node=NODE, node_id="n1")
    node = operation.result(timeout=60)
    assert node == cloud.tpu.get_node(name=node.name) == cloud.rest.get_node(name=node.name)
    listed = cloud.rest.list_operations({"name": PARENT}).operations
    assert [done.name for done in listed] == [operation.operation.name]
    assert cloud.rest.delete_operation({"name": operation.operation.name}) is None
    with pytest.raises(refused.NotFound):
        cloud.tpu.get_operation({"name": operation.operation.name})


def test_zones_have_their_types_and_runtimes(cloud: Cloud) -> None:
    types = {kind.type_: kind for kind in cloud.tpu.list_accelerator_types(parent=PARENT)}
    assert types["v5litepod-8"].accelerator_configs[0].topology == "2x4"
    assert "v6e-8" not in types
    versions = {runtime.version for runtime in cloud.rest.list_runtime_versions(parent=PARENT)}
    assert {"v2-alpha-tpuv5-lite", "tpu-ubuntu2204-base"} == versions
    request = locations_pb2.ListLocationsRequest(name="projects/p1")
    assert "us-east5-b" in {zone.location_id for zone in cloud.tpu.list_locations(request).locations}
    with pytest.raises(refused.NotFound, match="moon"):
        cloud.tpu.list_accelerator_types(parent="projects/p1/locations/moon")


def test_lists_have_pages(cloud: Cloud) -> None:
    """Google's clients read all pages, except of operations. A deletion between two pages moves no item."""
    nodes = [cloud.create(f"node{number}") for number in range(3)]
    names = [operation.result(timeout=60).name for operation in nodes]
    cloud.faults(stockout=["us-west1-c"])  # keeps the queued resources in the queue
    queued = [cloud.queue(f"q{number}", f"n{number}") for number in range(5)]
    made = [operation.operation.name for operation in [*nodes, *queued]]
    wanted = [f"{PARENT}/queuedResources/q{number}" for number in range(5)]
    for client in (cloud.tpu, cloud.rest):
        answers = list(client.list_nodes({"parent": PARENT, "page_size": 2}).pages)
        assert [[node.name for node in page.nodes] for page in answers] == [names[:2], names[2:]]
        pages = list(client.list_queued_resources({"parent": "projects/p1/locations/-", "page_size": 2}).pages)
        assert [[entry.name for entry in page.queued_resources] for page in pages] == [
            wanted[:2],
            wanted[2:4],
            wanted[4:],
        ]
        first = client.list_operations({"name": PARENT, "page_size": 5})
        last = client.list_operations({"name": PARENT, "page_token": first.next_page_token})
        assert [entry.name for entry in [*first.operations, *last.operations]] == made[::-1]
        assert not last.next_page_token
    first = cloud.tpu.list_queued_resources({"parent": PARENT, "page_size": 3})._response
    cloud.unqueue("q1").result(timeout=60)
    following = {"parent": PARENT, "page_token": first.next_page_token}
    assert [entry.name for entry in cloud.tpu.list_queued_resources(following)] == wanted[3:]
    types = list(cloud.rest.list_accelerator_types({"parent": PARENT, "page_size": 1}).pages)
    assert len(types) == len(list(cloud.tpu.list_accelerator_types(parent=PARENT))) > 1
    for wrong in ({"page_size": -1}, {"page_token": "x"}, {"page_token": "WzEsMl0="}):
        with pytest.raises(refused.InvalidArgument, match=next(iter(wrong))):
            cloud.tpu.list_nodes({"parent": PARENT, **wrong})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"accelerator_type": "v6e-8"}, "'v6e-8' is not available in zone us-west1-c"),
        ({"accelerator_type": ""}, "Accelerator type '' is not available"),
        ({"runtime_version": "v2-alpha-tpuv6e"}, "does not fit v5litepod-8"),
        ({"accelerator_config": {"type_": "V5LITE_POD", "topology": "2x4"}}, "only one of"),
        ({"scheduling_config": {"spot": True, "reserved": True}}, "at most one of"),
        ({"labels": {"Run": "1"}}, "label 'Run'"),
        ({"data_disks": [{"source_disk": "d1"}]}, "data_disks.source_disk is 'd1'"),
        ({"node_id": "N1"}, "node_id is 'N1'"),
    ],
)
def test_bad_nodes_are_refused(cloud: Cloud, fields: dict[str, Any], text: str) -> None:
    node_id = fields.pop("node_id", "n1")
    with pytest.raises(refused.InvalidArgument, match=text):
        cloud.tpu.create_node(parent=PARENT, node={**NODE, **fields}, node_id=node_id)
    with pytest.raises(refused.NotFound):
        cloud.node()


def test_features_that_are_not_emulated_are_refused(cloud: Cloud) -> None:
    with pytest.raises(refused.MethodNotImplemented, match="several machines"):
        cloud.tpu.create_node(parent=PARENT, node={**NODE, "accelerator_type": "v5litepod-16"}, node_id="n1")
    with pytest.raises(refused.MethodNotImplemented):
        cloud.tpu.generate_service_identity({"parent": PARENT})
    body = json.dumps({"acceleratorTypo": "v5litepod-8"}).encode()
    request = urllib.request.Request(f"{cloud.url}/v2/{PARENT}/nodes?nodeId=n1", body, method="POST")
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(request, timeout=60)
    with answer.value as error:
        assert (error.code, "acceleratorTypo" in error.read().decode()) == (400, True)


def test_capacity_and_quota_run_out(cloud: Cloud) -> None:
    cloud.faults(stockout=["us-west1-c"])
    with pytest.raises(refused.ResourceExhausted, match='There is no more capacity in the zone "us-west1-c"'):
        cloud.ready()
    with pytest.raises(refused.NotFound):
        cloud.node()
    cloud.faults(stockout=[], quota={"us-west1-c": 8})
    cloud.ready()
    with pytest.raises(refused.ResourceExhausted, match="Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI'"):
        cloud.create("n2")
    cloud.ready("n2", scheduling_config={"spot": True})  # spot nodes have a quota of their own
    with pytest.raises(refused.AlreadyExists):
        cloud.create("n1")


def test_calls_fail_on_purpose(cloud: Cloud) -> None:
    cloud.faults(fail_next={"method": "create_node", "status": "PERMISSION_DENIED", "message": "no"})
    with pytest.raises(refused.PermissionDenied, match="no"):
        cloud.create()
    cloud.faults(fail_next={"method": "create_node", "status": "UNAVAILABLE", "after_effect": True})
    with pytest.raises(refused.ServiceUnavailable):
        cloud.create()
    wait_for(lambda: cloud.node().state == State.READY)
    with pytest.raises(urllib.error.HTTPError, match="400") as answer:
        cloud.faults(stock_out=[])
    answer.value.close()


def test_a_queued_resource_from_request_to_deletion(cloud: Cloud) -> None:
    created = cloud.queue(spot={}, request_id="a3e1c1a0-0000-4000-8000-000000000001").result(timeout=60)
    assert created.state.state == QueuedState.ACCEPTED
    again = cloud.queue(spot={}, request_id="a3e1c1a0-0000-4000-8000-000000000001")
    assert again.result(timeout=60).name == created.name
    cloud.wait_for_state(QueuedState.ACTIVE)
    node = cloud.node()
    assert (node.queued_resource, node.scheduling_config.spot) == (created.name, True)
    with pytest.raises(refused.BadRequest, match="is ACTIVE and has nodes"):
        cloud.unqueue(force=False)
    with pytest.raises(refused.FailedPrecondition, match="cannot be stopped"):
        cloud.tpu.stop_node({"name": node.name})
    cloud.unqueue().result(timeout=60)
    for get in (cloud.queued, cloud.node):
        with pytest.raises(refused.NotFound):
            get()
    assert not cloud.processes()


def test_a_queued_resource_waits_for_capacity(cloud: Cloud) -> None:
    cloud.faults(stockout=["us-west1-c"])
    cloud.queue()
    cloud.wait_for_state(QueuedState.WAITING_FOR_RESOURCES)
    assert not list(cloud.tpu.list_nodes(parent=PARENT))
    cloud.faults(stockout=[])
    cloud.wait_for_state(QueuedState.ACTIVE)
    cloud.delete()
    cloud.wait_for_state(QueuedState.SUSPENDED)
    cloud.unqueue(force=False).result(timeout=60)


def test_a_queued_resource_expires_and_stays(cloud: Cloud) -> None:
    cloud.faults(stockout=["us-west1-c"])
    cloud.queue(queueing_policy={"valid_until_duration": {"nanos": 400_000_000}})
    failed = cloud.wait_for_state(QueuedState.FAILED)
    assert (failed.state.failed_data.error.code, "expired" in failed.state.failed_data.error.message) == (4, True)
    cloud.unqueue(force=False).result(timeout=60)
    assert not list(cloud.tpu.list_queued_resources(parent=PARENT))


def test_a_queued_resource_fails_for_want_of_quota(cloud: Cloud) -> None:
    cloud.faults(quota={"us-west1-c": 4})
    cloud.queue(spot={})
    error = cloud.wait_for_state(QueuedState.FAILED).state.failed_data.error
    assert (error.code, "TPUV5sPreemptibleLitepod" in error.message) == (8, True)


def test_a_preempted_queued_resource_is_suspended(cloud: Cloud) -> None:
    cloud.faults(preempt_next={"after_seconds": 0.2})
    cloud.queue(spot={})
    cloud.wait_for_state(QueuedState.SUSPENDED)
    assert cloud.node().state == State.PREEMPTED
    wait_for(lambda: not cloud.processes())
    cloud.unqueue().result(timeout=60)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"queued_id": "Q"}, "queued_resource_id is 'Q'"),
        ({"node_id": ""}, "node_id is ''"),
        ({"node": {"accelerator_type": "v9-8"}}, "'v9-8' is not available"),
        ({"spot": {}, "reservation_name": "r"}, "exclude each other"),
    ],
)
def test_bad_queued_resources_are_refused(cloud: Cloud, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(refused.InvalidArgument, match=text):
        cloud.queue(**fields)
    assert not list(cloud.tpu.list_queued_resources(parent=PARENT))


def test_a_disk_belongs_to_one_node(cloud: Cloud) -> None:
    disk = cloud.disk("d1")
    cloud.ready("n1", data_disks=[{"source_disk": disk, "mode": "READ_WRITE"}])
    with pytest.raises(refused.FailedPrecondition, match=f"already being used by '{PARENT}/nodes/n1'"):
        cloud.create("n2", data_disks=[{"source_disk": disk}])
    with pytest.raises(refused.NotFound, match="disks/d9"):
        cloud.create("n2", data_disks=[{"source_disk": disk.replace("d1", "d9")}])
    cloud.delete("n1")
    cloud.ready("n2", data_disks=[{"source_disk": disk}])


def test_the_next_stack_continues(home: Path) -> None:
    with BackgroundServer(lambda: build(home)) as server:
        first = Cloud(server, home)
        first.faults(stockout=["us-west1-c"])
        first.queue()
        first.wait_for_state(QueuedState.WAITING_FOR_RESOURCES)
        for channel in first.channels:
            channel.close()
    with BackgroundServer(lambda: build(home)) as server:
        second = Cloud(server, home)
        second.faults(stockout=[])
        second.wait_for_state(QueuedState.ACTIVE)
        wait_for(lambda: [len(pids) for pids in second.processes().values()] == [2])  # its shim and its init
        machine = second.processes()
    with BackgroundServer(lambda: build(home)) as server:
        third = Cloud(server, home)
        assert third.processes() == machine
        third.unqueue().result(timeout=60)
        assert not third.processes()
        for channel in third.channels:
            channel.close()
    db = Database(home / "state.db")
    assert TpuEmulator.names_in(db) == []
    db.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_manages_tpus(cloud: Cloud, tmp_path: Path, run_gcloud: RunGcloud) -> None:
    environment = {
        **os.environ,
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{cloud.url}/",
        "CLOUDSDK_CORE_PROJECT": "p1",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    }

    def gcloud(*arguments: str, zone: tuple[str, ...] = ("--zone=us-west1-c",)) -> Any:
        done = run_gcloud(["compute", "tpus", *arguments, *zone, "--format=json"], environment)
        assert done.returncode == 0, f"{arguments}: {done.stderr[-3000:]}"
        return json.loads(done.stdout or "null")

    assert "us-east5-b" in {location["locationId"] for location in gcloud("locations", "list", zone=())}
    for version in ("accelerator-types", "tpu-vm accelerator-types"):
        listed = gcloud(*version.split(), "list")
        assert f"{PARENT}/acceleratorTypes/v5litepod-8" in {kind["name"] for kind in listed}
    for version, kind in (("versions", "tensorflowVersions"), ("tpu-vm versions", "runtimeVersions")):
        listed = gcloud(*version.split(), "list")
        assert f"{PARENT}/{kind}/v2-alpha-tpuv5-lite" in {runtime["name"] for runtime in listed}
    shape = ("--accelerator-type=v5litepod-8", "--data-disk=source=" + cloud.disk("d1"))
    gcloud("tpu-vm", "create", "n1", "--version=v2-alpha-tpuv5-lite", "--spot", "--internal-ips", *shape)
    described = gcloud("tpu-vm", "describe", "n1")
    assert (described["state"], described["schedulingConfig"]) == ("READY", {"spot": True})
    gcloud("tpu-vm", "delete", "n1", "--quiet")
    gcloud(
        "queued-resources", "create", "q1", "--node-id=n2", "--runtime-version=v2-alpha-tpuv5-lite", "--spot", *shape
    )
    cloud.wait_for_state(QueuedState.ACTIVE)
    assert [entry["state"]["state"] for entry in gcloud("queued-resources", "list")] == ["ACTIVE"]
    gcloud("queued-resources", "delete", "q1", "--force", "--quiet")
    assert not list(cloud.tpu.list_nodes(parent=PARENT))
