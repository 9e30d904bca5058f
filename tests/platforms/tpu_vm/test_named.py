"""Named endpoints on TPU VMs: what a revision's machine is, and when its name may move. The verbs run on the real stack
in tests/stack."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from google.cloud.tpu_v2 import Node

from dropforge.base.clock import utc_now
from dropforge.base.errors import CloudError, Conflict
from dropforge.cloud import dns, tpu
from dropforge.cloud.listing import Listed
from dropforge.platforms.named import Candidate, RevisionGone, Share, owner_labels
from dropforge.platforms.serving import Deployment
from dropforge.platforms.tpu_vm.named import NamedTpuVms, machine_of
from dropforge.platforms.tpu_vm.serve import machine
from dropforge.platforms.tpu_vm.spec import TpuVmServe
from dropforge.spec import parse_spec

from ...deployments import SETTINGS, cloud_with

SERVER = NamedTpuVms()
DOMAIN = replace(SETTINGS, endpoint_domain="models.example.internal", endpoint_zone="names")
SPEC: dict[str, Any] = {
    "api_version": "dropforge/v1",
    "name": "sql",
    "model": {"source": "owner/tiny-1m"},
    "dataset": {"source": "owner/data"},
    "target": {"type": "cloud_run", "accelerator": "nvidia-l4", "placements": [{"region": "us-central1"}]},
    "serve": {"type": "tpu_vm", "zone": "us-west4-a", "endpoint": "text-to-sql"},
}
SERVICE = "projects/x/managedZones/names/rrsets/text-to-sql.us-west4-a.models.example.internal./A"
NODE = "projects/x/locations/us-west4-a/nodes/df-r2-text-to-sql"


def candidate(number: int = 2, rollout: str = "r-1") -> Candidate:
    spec = parse_spec(json.dumps(SPEC).encode())
    return Candidate(rollout, number, Deployment("run-1", spec, DOMAIN, utc_now(), endpoint="text-to-sql"))


def test_the_machine_of_a_revision_has_its_own_name_and_no_end() -> None:
    own, made = machine(candidate().deployment), machine_of(candidate())
    assert (made.node, made.queued) == (NODE, NODE.replace("/nodes/", "/queuedResources/"))
    assert made.labels["dropforge-endpoint"] == "text-to-sql"
    assert "dropforge-expires" not in made.labels
    assert int(made.metadata["dropforge-deadline"]) > int(own.metadata["dropforge-deadline"])
    lines = made.metadata["dropforge-env"].splitlines()
    assert "DROPFORGE_DRAIN_SECONDS=20" in lines
    assert set(own.metadata["dropforge-env"].splitlines()) < set(lines)


def test_a_machine_that_is_requested_again_is_another_request() -> None:
    """Cloud TPU would answer a repeated request with what became of the first."""
    ids = [tpu.queued_request(machine_of(candidate(rollout=name)))["requestId"] for name in ("r-1", "r-1", "r-2")]
    assert ids[0] == ids[1] != ids[2]


def test_the_name_has_the_zone_and_the_domain() -> None:
    assert SERVER.service_name(candidate().deployment) == SERVICE
    assert dns.host_of(SERVICE) == "text-to-sql.us-west4-a.models.example.internal"
    assert SERVER.resources(SERVICE, "df-r2-text-to-sql") == [SERVICE, NODE]


def test_a_deployment_without_a_zone_refuses_names_with_the_price() -> None:
    serve = TpuVmServe(type="tpu_vm", zone="us-west4-a", endpoint="text-to-sql")
    spec = parse_spec(json.dumps(SPEC).encode())
    with_image = replace(SETTINGS, serve_vllm_tpu_image="i@sha256:1")
    (problem,) = serve.missing(spec, with_image)
    assert (problem.pointer, "0.20 USD a month" in str(problem.expected)) == ("/serve/endpoint", True)
    assert list(serve.missing(spec, replace(with_image, endpoint_domain="a.b"))) == []


def moved(shift: Callable[..., Any], *, address: str, read: str | None) -> list[Any]:
    """Call `shift` with a node at an address and a record with another one; return what the record was changed to."""
    node = SimpleNamespace(network_endpoints=[SimpleNamespace(ip_address=address)], state=2, health_description="")
    record = None if read is None else {"name": "n.", "type": "A", "ttl": 5, "rrdatas": [read]}
    changed: list[Any] = []

    def change(_: Any, name: str, old: Any, new: str) -> bool:
        changed.append((name, old, new))
        return True

    with (
        patch.object(dns, "find_record", lambda *_: record),
        patch.object(dns, "change_record", change),
        patch.object(tpu, "find_node", lambda *_: node),
    ):
        shift()
    return changed


SHARES = [Share("df-r2-text-to-sql", 2, 100), Share("df-r1-text-to-sql", 1, 0)]
CLOUD: Any = SimpleNamespace(settings=DOMAIN)


def test_the_change_has_the_record_that_was_read_as_its_precondition() -> None:
    shift = lambda: SERVER.shift(CLOUD, SERVICE, SHARES)  # noqa: E731
    ((name, old, new),) = moved(shift, address="10.0.0.2", read="10.0.0.1")
    assert (name, old["rrdatas"], new) == (SERVICE, ["10.0.0.1"], "10.0.0.2")
    assert moved(shift, address="10.0.0.2", read="10.0.0.2") == []
    assert moved(shift, address="10.0.0.2", read=None) == [(SERVICE, None, "10.0.0.2")]


def test_a_superseded_call_moves_no_name() -> None:
    def fence() -> None:
        raise Conflict("another call has taken the rollout further")

    with pytest.raises(Conflict):
        moved(lambda: SERVER.shift(CLOUD, SERVICE, SHARES, fence), address="10.0.0.2", read="10.0.0.1")


def node_in(state: str, address: str = "10.0.0.2") -> Any:
    endpoints = [SimpleNamespace(ip_address=address)]
    return SimpleNamespace(
        name=NODE, state=Node.State[state], network_endpoints=endpoints, health_description="", labels={}
    )


@pytest.mark.parametrize("state", ["", "DELETING", "PREEMPTED", "TERMINATED", "STOPPING", "STOPPED"])
def test_a_name_never_moves_to_a_machine_that_does_not_run(state: str) -> None:
    """The node of a preempted machine still has an address."""
    with patch.object(tpu, "find_node", lambda *_: node_in(state) if state else None):
        assert SERVER.find(CLOUD, SERVICE, 2) is None
        with pytest.raises(RevisionGone):
            SERVER.shift(CLOUD, SERVICE, SHARES)


@pytest.mark.parametrize(
    ("state", "address", "expected"),
    [
        ("READY", "10.0.0.2", False),
        ("READY", "10.0.0.9", True),
        ("READY", "", True),
        ("PREEMPTED", "10.0.0.2", True),
        ("", "10.0.0.2", True),
    ],
)
def test_an_endpoint_is_lost_if_its_name_does_not_lead_to_a_machine_that_runs(
    state: str, address: str, expected: bool
) -> None:
    record = {"rrdatas": [address]} if address else None
    with (
        patch.object(dns, "find_record", lambda *_: record),
        patch.object(tpu, "find_node", lambda *_: node_in(state) if state else None),
    ):
        assert SERVER.is_lost(CLOUD, SERVICE, "df-r2-text-to-sql") is expected
    with (
        patch.object(dns, "find_record", lambda *_: {"routingPolicy": {}}),
        patch.object(tpu, "find_node", lambda *_: node_in("READY")),
    ):
        assert SERVER.is_lost(CLOUD, SERVICE, "df-r2-text-to-sql"), "somebody has given the name a routing policy"


def test_what_is_left_of_a_machine_that_ended_is_deleted_before_another_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not what this rollout has requested: its failure must end the rollout."""
    deleted: list[str] = []
    started: list[Any] = []
    labels = owner_labels(DOMAIN, "text-to-sql")
    parts = [
        Listed(tpu.QUEUED, NODE, {**labels, "dropforge-rollout": "r-1"}),
        Listed(tpu.QUEUED, NODE.replace("r2", "r3"), {**labels, "dropforge-rollout": "r-2"}),
    ]
    monkeypatch.setattr(tpu, "list_queued", lambda _: parts)
    monkeypatch.setattr(tpu, "list_nodes", lambda _: [])
    monkeypatch.setattr(tpu, "delete", lambda cloud, kind, name: deleted.append(name))
    monkeypatch.setattr(tpu, "find_node", lambda *_: node_in("PREEMPTED"))

    def start(cloud: Any, candidate: Candidate) -> str:
        started.append(candidate)
        return "http://10.0.0.3:8000"

    monkeypatch.setattr(SERVER, "_start", start)
    assert not SERVER.resume(cloud_with(DOMAIN), SERVICE, [candidate(rollout="r-5")])
    assert (deleted, started) == ([NODE], [])
    assert SERVER.resume(cloud_with(DOMAIN), SERVICE, [candidate(rollout="r-1")])
    assert (deleted, len(started)) == ([NODE], 1)
    monkeypatch.setattr(tpu, "find_node", lambda *_: node_in("READY"))
    assert SERVER.resume(cloud_with(DOMAIN), SERVICE, [candidate(rollout="r-5")])
    assert deleted == [NODE], "the machine runs: only its name was changed"


def machines_of(endpoint: str, *numbers: int) -> list[Listed]:
    """The nodes of some revisions of an endpoint, as a list of the zone has them."""
    nodes = [f"{NODE.rpartition('/')[0]}/df-r{number}-{endpoint}" for number in numbers]
    return [Listed(tpu.NODE, node, owner_labels(DOMAIN, endpoint)) for node in nodes]


@pytest.fixture
def deleted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The machines that are deleted; two endpoints have some in the zone, and the record of the first exists."""
    names: list[str] = []

    def delete(cloud: Any, kind: str, name: str) -> bool:
        names.append(name.rpartition("/")[2])
        return True

    def nodes(_: Any) -> list[Listed]:
        found = [*machines_of("text-to-sql", 1, 2, 3), *machines_of("text-to-sql-b", 1)]
        return [each for each in found if each.name.rpartition("/")[2] not in names]

    monkeypatch.setattr(tpu, "delete", delete)
    monkeypatch.setattr(tpu, "list_queued", lambda _: [])
    monkeypatch.setattr(tpu, "list_nodes", nodes)
    monkeypatch.setattr(dns, "find_record", lambda *_: {"rrdatas": ["10.0.0.1"]})
    monkeypatch.setattr(dns, "change_record", lambda *_: True)
    return names


def test_only_machines_of_older_revisions_are_pruned(deleted: list[str]) -> None:
    SERVER.prune(cloud_with(DOMAIN), SERVICE, {"df-r2-text-to-sql"}, 2)  # the third has begun meanwhile
    assert deleted == ["df-r1-text-to-sql"]


def test_the_end_of_an_endpoint_deletes_all_its_machines_and_no_others(deleted: list[str]) -> None:
    assert SERVER.delete(cloud_with(DOMAIN), SERVICE)
    assert deleted == ["df-r1-text-to-sql", "df-r2-text-to-sql", "df-r3-text-to-sql"]


def test_no_machine_ends_before_its_name(deleted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine of the network may get the address, and would get the requests."""
    monkeypatch.setattr(dns, "change_record", lambda *_: False)
    assert not SERVER.delete(cloud_with(DOMAIN), SERVICE)
    assert deleted == []


def test_a_superseded_call_suspends_nothing(deleted: list[str]) -> None:
    def fence() -> None:
        raise Conflict("another call has taken the rollout further")

    with pytest.raises(Conflict):
        SERVER.suspend(cloud_with(DOMAIN), SERVICE, SHARES, fence)
    assert deleted == []


def test_a_call_that_another_one_overtakes_deletes_nothing_more(deleted: list[str]) -> None:
    """The next rollout may have requested a machine meanwhile."""
    states = iter([None, None, Conflict("another call has taken the rollout further")])

    def fence() -> None:
        if error := next(states):
            raise error

    with pytest.raises(Conflict):
        SERVER.suspend(cloud_with(DOMAIN), SERVICE, SHARES, fence)
    assert deleted == ["df-r1-text-to-sql"]


def test_a_machine_of_another_deployment_becomes_no_revision() -> None:
    labels = {**owner_labels(DOMAIN, "text-to-sql"), "dropforge-deployment": "another"}
    with (
        patch.object(tpu, "find_node", lambda *_: SimpleNamespace(labels=labels, state=2, health_description="")),
        pytest.raises(CloudError, match=r"exists and belongs to .*another"),
    ):
        SERVER.deploy(cloud_with(DOMAIN), candidate(), SHARES)
