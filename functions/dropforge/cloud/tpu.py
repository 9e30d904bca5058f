"""TPU VMs for training and for serving: the requests that create them, their owners, and their deletion.

A machine is a node. A queued resource creates the node once there is capacity, or a request creates the node at once.
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

from .classify import classify, classify_create, classify_first_look, classify_text, client_errors, status_of
from .clients import TIMEOUT_SECONDS
from .context import Cloud
from .listing import Entry, Listed, unreachable
from .resource import Resource, check_owner

QUEUED = "tpu.googleapis.com/QueuedResource"
NODE = "tpu.googleapis.com/Node"
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
WORK_DIRECTORY = "/work"  # where the startup script mounts the data disk, or a part of the boot disk, in the container
SERVER_PORT = 8000
SERVER_TAG = "dropforge-server"  # a firewall rule that admits requests names this tag
_REQUESTS = uuid.UUID("6f9a5b6e-0c55-4f0e-9f3e-6f6f4b9b5b11")


@dataclass(frozen=True)
class Machine:
    """A TPU VM to create. `node` and `queued` are full names; `queued` is "" for a node that is created at once."""

    settings: Settings
    run: str
    node: str
    queued: str
    accelerator_type: str
    runtime_version: str
    capacity: str
    reservation: str | None
    wait_seconds: int  # the longest time in the queue
    use_seconds: int  # the shortest time that `guaranteed` capacity is for
    service_account: str
    labels: Mapping[str, str]
    metadata: Mapping[str, str]
    data_disk: str = ""
    tags: tuple[str, ...] = ()
    request: str = ""  # the id of what requests the machine, where the same name may be requested again


def server_variables(environment: Iterable[Mapping[str, str]], chips: int) -> str:
    """The environment of a server, one NAME=VALUE per line: a container's `env`, and the variables of TPU VMs only."""
    variables = {
        **{variable["name"]: variable["value"] for variable in environment},
        "DROPFORGE_TENSOR_PARALLEL_SIZE": str(chips),
        "DROPFORGE_WORK_DIRECTORY": WORK_DIRECTORY,
        "PORT": str(SERVER_PORT),
    }
    return "\n".join(f"{name}={value}" for name, value in variables.items())


def resources(machine: Machine) -> list[Resource]:
    """The resources of a machine. The queue creates the node; the list names it so that its deletion is verified."""
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
        "requestId": request_id(f"{name}/{machine.request}" if machine.request else name, "queued-resource"),
        "queuedResource": queued,
    }


def node_request(machine: Machine) -> dict[str, Any]:
    """The createNode request, as JSON."""
    parent, _, name = machine.node.rpartition("/nodes/")
    scheduling = {"spot": {"spot": True}, "reservation": {"reserved": True}}.get(machine.capacity)
    node = _node(machine) | ({"schedulingConfig": scheduling} if scheduling else {})
    return {"parent": parent, "nodeId": name, "node": node}


def request_id(name: str, part: str) -> str:
    """The id of the only request that creates this part; after a lost reply, the request repeats with the same id."""
    return str(uuid.uuid5(_REQUESTS, f"{name}/{part}"))


def ensure(cloud: Cloud, machine: Machine) -> bool:
    """Request the machine unless it exists; True once it exists. Repeated calls create nothing twice.

    A machine in the queue counts as existing; a node without a queue must have been created. Raises CloudError.
    """
    client = cloud.clients.tpu()
    try:
        known = _find(client.get_queued_resource, machine.queued) if machine.queued else find_node(cloud, machine.node)
    except client_errors() as error:
        raise classify_first_look(error) from error
    try:
        return _queue(cloud, machine, known) if machine.queued else _create(cloud, machine, known)
    except CloudError:
        raise
    except client_errors() as error:
        raise classify(error) from error


def find_machine(cloud: Cloud, machine: Machine) -> tuple[Any, Any]:
    """The QueuedResource and the Node, each None if it does not exist. Raises errors of the client."""
    client = cloud.clients.tpu()
    queued = _find(client.get_queued_resource, machine.queued) if machine.queued else None
    return queued, _find(client.get_node, machine.node)


def find_node(cloud: Cloud, name: str) -> Any:
    """The Node; None if it does not exist. Raises errors of the client."""
    return _find(cloud.clients.tpu().get_node, name)


def list_queued(cloud: Cloud) -> Iterator[Entry]:
    """Queued resources in every zone, with the labels of the requested node: a queued resource has no labels."""
    request = {"parent": f"projects/{cloud.settings.project}/locations/-"}
    for page in cloud.clients.tpu().list_queued_resources(request=request, timeout=TIMEOUT_SECONDS).pages:
        for queued in page.queued_resources:
            specs = queued.tpu.node_spec
            yield Listed(QUEUED, queued.name, dict(specs[0].node.labels) if specs else {}, queued.create_time)
        yield from unreachable(page.unreachable, "queued resources")


def list_nodes(cloud: Cloud) -> Iterator[Entry]:
    """Nodes in every zone, including the nodes of queued resources."""
    request = {"parent": f"projects/{cloud.settings.project}/locations/-"}
    for page in cloud.clients.tpu().list_nodes(request=request, timeout=TIMEOUT_SECONDS).pages:
        for node in page.nodes:
            yield Listed(NODE, node.name, dict(node.labels), node.create_time)
        yield from unreachable(page.unreachable, "nodes")


def delete(cloud: Cloud, kind: str, name: str) -> bool:
    """Delete a queued resource with its node, or a node; True once it does not exist. Raises CloudError."""
    try:
        return _delete_queued(cloud, name) if kind == QUEUED else _delete_node(cloud, name)
    except client_errors() as error:
        raise classify(error) from error


def _node(machine: Machine) -> dict[str, Any]:
    """The Node, as JSON: no external address, a service account, and the startup script that all machines share."""
    settings, zone = machine.settings, machine.node.split("/")[3]
    network = f"projects/{settings.project}/global/networks/{settings.network}"
    subnetwork = f"projects/{settings.project}/regions/{zone.rsplit('-', 1)[0]}/subnetworks/{settings.subnetwork}"
    node: dict[str, Any] = {
        "acceleratorType": machine.accelerator_type,
        "runtimeVersion": machine.runtime_version,
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


def _queue(cloud: Cloud, machine: Machine, queued: Any) -> bool:
    """Request the queued resource if it is None; True once it exists. The caller waits for the capacity."""
    from google.cloud import tpu_v2

    name, client = machine.queued, cloud.clients.tpu()
    if queued is None:
        request = tpu_v2.CreateQueuedResourceRequest.from_json(json.dumps(queued_request(machine)))
        _begin(lambda: client.create_queued_resource(request=request, timeout=TIMEOUT_SECONDS), "ALREADY_EXISTS")
        queued = _find(client.get_queued_resource, name)
    if queued is None:
        return False
    check_owner(name, queued.tpu.node_spec[0].node.labels, machine.run)
    return True


def _create(cloud: Cloud, machine: Machine, node: Any) -> bool:
    """Create the node if it is None; True once it is ready. The operation carries a refusal."""
    from google.cloud import tpu_v2

    name, client = machine.node, cloud.clients.tpu()
    if node is None:
        _raise_if_refused(cloud, name)
        request = tpu_v2.CreateNodeRequest.from_json(json.dumps(node_request(machine)))
        _begin(lambda: client.create_node(request=request, timeout=TIMEOUT_SECONDS), "ALREADY_EXISTS")
        return False
    check_owner(name, node.labels, machine.run)
    return bool(node.state != tpu_v2.Node.State.CREATING)


def _raise_if_refused(cloud: Cloud, name: str) -> None:
    """Raise the error of an earlier creation of this node: the operation remains after the node is deleted."""
    from google.cloud.tpu_v2 import OperationMetadata
    from google.rpc import code_pb2

    for operation in _operations(cloud, name.rsplit("/nodes/", 1)[0]):
        metadata = OperationMetadata.deserialize(operation.metadata.value)
        if metadata.target == name and operation.error.code:
            raise classify_text(code_pb2.Code.Name(operation.error.code), operation.error.message)


def _operations(cloud: Cloud, parent: str) -> Iterator[Any]:
    """Every operation in a zone, page by page: this method of the client does not request the next page itself."""
    request = {"name": parent, "page_token": ""}
    while True:
        page = cloud.clients.tpu().list_operations(request, timeout=TIMEOUT_SECONDS)
        yield from page.operations
        if not page.next_page_token:
            return
        request["page_token"] = page.next_page_token


def _delete_queued(cloud: Cloud, name: str) -> bool:
    from google.cloud.tpu_v2 import DeleteQueuedResourceRequest, QueuedResourceState

    client = cloud.clients.tpu()
    queued = _find(client.get_queued_resource, name)
    if queued is None:
        return True
    if queued.state.state != QueuedResourceState.State.DELETING:
        request = DeleteQueuedResourceRequest(name=name, force=True)
        _begin(lambda: client.delete_queued_resource(request=request, timeout=TIMEOUT_SECONDS), *_ALREADY_DELETED)
    return False


def _delete_node(cloud: Cloud, name: str) -> bool:
    """Delete a node. A queued resource's node is deleted with the queued resource, or alone if that does not exist."""
    from google.cloud.tpu_v2 import Node

    client = cloud.clients.tpu()
    node = _find(client.get_node, name)
    if node is None:
        return True
    is_held = node.queued_resource and _find(client.get_queued_resource, node.queued_resource) is not None
    if node.state != Node.State.DELETING and not is_held:
        _begin(lambda: client.delete_node(name=name, timeout=TIMEOUT_SECONDS), *_ALREADY_DELETED)
    return False


# The resource does not exist any more, or another deletion has begun.
_ALREADY_DELETED = ("NOT_FOUND", "FAILED_PRECONDITION", "ABORTED")


def _begin(call: Callable[[], Any], *harmless: str) -> None:
    """Start an operation; an error with a status in `harmless` means that there is nothing left to start.

    Raises CloudError.
    """
    try:
        call()
    except client_errors() as error:
        if status_of(error) not in harmless:
            raise classify_create(error) from error


def _find(get: Callable[..., Any], name: str) -> Any:
    from google.api_core.exceptions import NotFound

    try:
        return get(name=name, timeout=TIMEOUT_SECONDS)
    except NotFound:
        return None
