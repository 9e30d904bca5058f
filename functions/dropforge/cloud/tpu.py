"""TPU VMs, whatever they are for: the requests that make them, whose they are, and their end.

A machine is a node, which a queued resource makes once there is capacity, or which is made at once.
API: https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dropforge.base.errors import CloudError
from dropforge.base.settings import Settings
from dropforge.platforms.tpu_vm.catalog import TPU_VMS

from . import clients
from .classify import classify, classify_text, client_errors, status_of
from .clients import TIMEOUT_SECONDS
from .listing import Found, Listed, unreachable
from .resource import Resource, check_owner

QUEUED = "tpu.googleapis.com/QueuedResource"
NODE = "tpu.googleapis.com/Node"
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
WORK_DIRECTORY = "/work"  # where the startup script mounts the data disk, or a part of the boot disk, in the container
SERVER_PORT = 8000
SERVER_TAG = "dropforge-server"  # for a firewall rule that lets requests in
_REQUESTS = uuid.UUID("6f9a5b6e-0c55-4f0e-9f3e-6f6f4b9b5b11")


@dataclass(frozen=True)
class Machine:
    """A TPU VM that is wanted. `node` and `queued` are full names; `queued` is "" for a node that is made at once."""

    settings: Settings
    run: str
    node: str
    queued: str
    accelerator_type: str
    runtime_version: str | None
    capacity: str
    reservation: str | None
    wait_seconds: int  # in the queue, at most
    use_seconds: int  # what `guaranteed` capacity is for, at least
    service_account: str
    labels: Mapping[str, str]
    metadata: Mapping[str, str]
    data_disk: str = ""
    tags: tuple[str, ...] = ()


def server_variables(environment: Iterable[Mapping[str, str]], accelerator_type: str) -> str:
    """What a server is told, one NAME=VALUE per line: a container's `env`, and what only TPU VMs have."""
    variables = {
        **{one["name"]: one["value"] for one in environment},
        "DROPFORGE_TENSOR_PARALLEL_SIZE": str(TPU_VMS[accelerator_type].chips),
        "DROPFORGE_WORK_DIRECTORY": WORK_DIRECTORY,
        "PORT": str(SERVER_PORT),
    }
    return "\n".join(f"{name}={value}" for name, value in variables.items())


def resources(machine: Machine) -> list[Resource]:
    """What is created. The queue makes the node; it is listed so that it is seen to be gone, too."""
    if machine.queued:
        return [Resource(QUEUED, machine.queued, queued_request(machine)), Resource(NODE, machine.node)]
    return [Resource(NODE, machine.node, node_request(machine))]


def queued_request(machine: Machine) -> dict[str, Any]:
    """The createQueuedResource request, as JSON."""
    parent, _, name = machine.queued.rpartition("/queuedResources/")
    spec = {"parent": parent, "nodeId": machine.node.rpartition("/nodes/")[2], "node": _node(machine)}
    queued: dict[str, Any] = {
        "tpu": {"nodeSpec": [spec]},
        "queueingPolicy": {"validUntilDuration": f"{machine.wait_seconds}s"},
    }
    if machine.capacity == "spot":
        queued["spot"] = {}
    if machine.capacity == "guaranteed":
        queued["guaranteed"] = {"minDuration": f"{machine.use_seconds}s"}
    if machine.reservation:
        queued["reservationName"] = f"{parent}/reservations/{machine.reservation}"
    return {
        "parent": parent,
        "queuedResourceId": name,
        "requestId": request_id(name, "queued-resource"),
        "queuedResource": queued,
    }


def node_request(machine: Machine) -> dict[str, Any]:
    """The createNode request, as JSON."""
    parent, _, name = machine.node.rpartition("/nodes/")
    scheduling = {"spot": {"spot": True}, "reservation": {"reserved": True}}.get(machine.capacity)
    wanted = _node(machine) | ({"schedulingConfig": scheduling} if scheduling else {})
    return {"parent": parent, "nodeId": name, "node": wanted}


def request_id(name: str, what: str) -> str:
    """The id of the one request that makes this; a reply that was lost is asked for again with the same id."""
    return str(uuid.uuid5(_REQUESTS, f"{name}/{what}"))


def ensure(machine: Machine) -> bool:
    """Ask for the machine, unless it is there; True once it is. Called again, it makes nothing twice.

    Waiting in the queue counts as there; a node that is made at once must have been made. Raises CloudError.
    """
    try:
        return _queue(machine) if machine.queued else _take(machine)
    except CloudError:
        raise
    except client_errors() as error:
        raise classify(error) from error


def look(machine: Machine) -> tuple[Any, Any]:
    """The QueuedResource and the Node, each None where it does not exist. Raises errors of the client."""
    queued = _find(clients.tpu().get_queued_resource, machine.queued) if machine.queued else None
    return queued, _find(clients.tpu().get_node, machine.node)


def list_queued(project: str) -> Iterator[Found]:
    """Queued resources in every zone, with the labels of the node that each asks for: they have none of their own."""
    request = {"parent": f"projects/{project}/locations/-"}
    for page in clients.tpu().list_queued_resources(request=request, timeout=TIMEOUT_SECONDS).pages:
        for queued in page.queued_resources:
            specs = queued.tpu.node_spec
            yield Listed(QUEUED, queued.name, dict(specs[0].node.labels) if specs else {}, queued.create_time)
        yield from unreachable(page.unreachable, "queued resources")


def list_nodes(project: str) -> Iterator[Found]:
    """Nodes in every zone, also those that a queued resource holds."""
    request = {"parent": f"projects/{project}/locations/-"}
    for page in clients.tpu().list_nodes(request=request, timeout=TIMEOUT_SECONDS).pages:
        for node in page.nodes:
            yield Listed(NODE, node.name, dict(node.labels), node.create_time)
        yield from unreachable(page.unreachable, "nodes")


def delete(kind: str, name: str) -> bool:
    """Delete a queued resource with its node, or a node; True once it does not exist. Raises CloudError."""
    try:
        return _delete_queued(name) if kind == QUEUED else _delete_node(name)
    except client_errors() as error:
        raise classify(error) from error


def _node(machine: Machine) -> dict[str, Any]:
    """The Node, as JSON: no external address, an account of its own, and a script that is the same for all."""
    settings, zone = machine.settings, machine.node.split("/")[3]
    network = f"projects/{settings.project}/global/networks/{settings.network}"
    subnetwork = f"projects/{settings.project}/regions/{zone.rsplit('-', 1)[0]}/subnetworks/{settings.subnetwork}"
    node: dict[str, Any] = {
        "acceleratorType": machine.accelerator_type,
        "runtimeVersion": machine.runtime_version or TPU_VMS[machine.accelerator_type].runtimes[0],
        "networkConfig": {"network": network, "subnetwork": subnetwork, "enableExternalIps": False},
        "serviceAccount": {"email": machine.service_account, "scope": [CLOUD_PLATFORM]},
        "labels": dict(machine.labels),
        "metadata": dict(machine.metadata),
    }
    if machine.data_disk:
        node["dataDisks"] = [{"sourceDisk": machine.data_disk, "mode": "READ_WRITE"}]
    if machine.tags:
        node["tags"] = list(machine.tags)
    return node


def _queue(machine: Machine) -> bool:
    """Ask for the queued resource, unless it is there. Waiting for capacity is the caller's, not ours."""
    from google.cloud import tpu_v2

    name, client = machine.queued, clients.tpu()
    found = _find(client.get_queued_resource, name)
    if found is None:
        request = tpu_v2.CreateQueuedResourceRequest.from_json(json.dumps(queued_request(machine)))
        _begin(lambda: client.create_queued_resource(request=request, timeout=TIMEOUT_SECONDS), "ALREADY_EXISTS")
        found = _find(client.get_queued_resource, name)
    if found is None:
        return False
    check_owner(name, found.tpu.node_spec[0].node.labels, machine.run)
    return True


def _take(machine: Machine) -> bool:
    """Create the node, unless it is there; True once it is ready. A refusal comes with the operation."""
    from google.cloud import tpu_v2

    name, client = machine.node, clients.tpu()
    node = _find(client.get_node, name)
    if node is None:
        _raise_if_refused(name)
        request = tpu_v2.CreateNodeRequest.from_json(json.dumps(node_request(machine)))
        _begin(lambda: client.create_node(request=request, timeout=TIMEOUT_SECONDS), "ALREADY_EXISTS")
        return False
    check_owner(name, node.labels, machine.run)
    return bool(node.state != tpu_v2.Node.State.CREATING)


def _raise_if_refused(name: str) -> None:
    """Raise what an earlier creation of a node has ended with: the node is gone, its operation is not."""
    from google.cloud.tpu_v2 import OperationMetadata
    from google.rpc import code_pb2

    for operation in _operations(name.rsplit("/nodes/", 1)[0]):
        about = OperationMetadata.deserialize(operation.metadata.value)
        if about.target == name and operation.error.code:
            raise classify_text(code_pb2.Code.Name(operation.error.code), operation.error.message)


def _operations(parent: str) -> Iterator[Any]:
    """Every operation in a zone, page by page: this method of the client does not turn pages itself."""
    request = {"name": parent, "page_token": ""}
    while True:
        page = clients.tpu().list_operations(request, timeout=TIMEOUT_SECONDS)
        yield from page.operations
        if not page.next_page_token:
            return
        request["page_token"] = page.next_page_token


def _delete_queued(name: str) -> bool:
    from google.cloud.tpu_v2 import DeleteQueuedResourceRequest, QueuedResourceState

    client = clients.tpu()
    found = _find(client.get_queued_resource, name)
    if found is None:
        return True
    if found.state.state != QueuedResourceState.State.DELETING:
        request = DeleteQueuedResourceRequest(name=name, force=True)
        _begin(lambda: client.delete_queued_resource(request=request, timeout=TIMEOUT_SECONDS), *_GOING)
    return False


def _delete_node(name: str) -> bool:
    """One that a queued resource holds is deleted with that, and by itself once that is gone."""
    from google.cloud.tpu_v2 import Node

    client = clients.tpu()
    found = _find(client.get_node, name)
    if found is None:
        return True
    is_held = found.queued_resource and _find(client.get_queued_resource, found.queued_resource) is not None
    if found.state != Node.State.DELETING and not is_held:
        _begin(lambda: client.delete_node(name=name, timeout=TIMEOUT_SECONDS), *_GOING)
    return False


_GOING = ("NOT_FOUND", "FAILED_PRECONDITION", "ABORTED")  # gone by now, or another deletion has begun


def _begin(call: Callable[[], Any], *harmless: str) -> None:
    """Begin an operation; an answer with one of these statuses says that nothing is left to begin."""
    try:
        call()
    except client_errors() as error:
        if status_of(error) not in harmless:
            raise


def _find(get: Callable[..., Any], name: str) -> Any:
    from google.api_core.exceptions import NotFound

    try:
        return get(name=name, timeout=TIMEOUT_SECONDS)
    except NotFound:
        return None
