"""Target `tpu_vm`: one TPU VM per attempt, in Google's queue for capacity or at once, and a data disk of its own.

The machine does what tpu_vm_startup.sh says, with nothing but metadata values; nobody logs in to it. A node has no exit
status: how the container ended is what the script writes beside the run, and what the node's own state says.
API: https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from .. import clients, names
from ..catalog import TPU_VMS, HourlyPrice
from ..classify import classify, classify_text, client_errors, status_of
from ..clients import TIMEOUT_SECONDS
from ..disks import delete_disk, ensure_disk
from ..errors import CloudError, ErrorClass
from ..spec import JobSpec, TpuVmTarget, seconds
from .base import (
    Launch,
    Phase,
    Resource,
    Status,
    class_of_exit,
    container_variables,
    secret_references,
)

DISK = "compute.googleapis.com/Disk"
QUEUED = "tpu.googleapis.com/QueuedResource"
NODE = "tpu.googleapis.com/Node"
STARTUP_SCRIPT = Path(__file__).with_name("tpu_vm_startup.sh")
WORK_DIRECTORY = "/work"  # where the startup script mounts the data disk in the container
GRACE_SECONDS = 25  # of the 30 between a preemption and the end
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
# Compute Engine's name for the first disk that is attached without one.
DATA_DISK = "persistent-disk-1"
_REQUESTS = uuid.UUID("6f9a5b6e-0c55-4f0e-9f3e-6f6f4b9b5b11")
_DEADLINE_EXCEEDED = 4  # google.rpc.Code
_RESUMES = "training resumes from its last checkpoint"


class TpuVms:
    """See `Target` for the contract of each verb."""

    def regions(self, spec: JobSpec) -> list[str]:
        return [placement.zone for placement in tpu_vm_target(spec).placements]

    def price(self, spec: JobSpec, placement: int) -> HourlyPrice:
        target = tpu_vm_target(spec)
        if target.price_usd_per_hour is not None:
            return HourlyPrice(target.price_usd_per_hour, None, "target.price_usd_per_hour in the spec")
        where = f"{target.accelerator_type} in {target.placements[placement].zone}"
        source = f"no price for TPU VM {where} in dropforge/catalog.py; set target.price_usd_per_hour"
        return HourlyPrice(None, None, source)

    def resources(self, launch: Launch) -> list[Resource]:
        disk, node = Resource(DISK, disk_name(launch), disk_request(launch)), node_name(launch)
        if tpu_vm_target(launch.spec).queued:
            # The queue makes the node; it is listed so that it is seen to be gone, too.
            return [disk, Resource(QUEUED, queued_name(launch), queued_request(launch)), Resource(NODE, node)]
        return [disk, Resource(NODE, node, node_request(launch))]

    def provision(self, launch: Launch) -> bool:
        if not ensure_disk(disk_name(launch), disk_request(launch)):
            return False
        try:
            return self._queue(launch) if tpu_vm_target(launch.spec).queued else self._take(launch)
        except CloudError:
            raise
        except client_errors() as error:
            raise classify(error) from error

    def inspect(self, launch: Launch) -> Status:
        try:
            node = _find(clients.tpu().get_node, node_name(launch))
            if tpu_vm_target(launch.spec).queued:
                queued = _find(clients.tpu().get_queued_resource, queued_name(launch))
                status = status_of_queued(queued, node, queued_name(launch))
            else:
                status = status_of_node(node, node_name(launch))
            # What the machine has written outlives it, and says more than how the machine ended.
            return (_written(launch) if node is not None else None) or status
        except client_errors() as error:
            raise classify(error) from error

    def teardown(self, kind: str, name: str) -> bool:
        if kind == DISK:
            return delete_disk(name)
        try:
            return _delete_queued(name) if kind == QUEUED else _delete_node(name)
        except client_errors() as error:
            raise classify(error) from error

    def _queue(self, launch: Launch) -> bool:
        """Ask for the queued resource, unless it is there. Waiting for capacity is the attempt's, not ours."""
        from google.cloud import tpu_v2

        name, client = queued_name(launch), clients.tpu()
        found = _find(client.get_queued_resource, name)
        if found is None:
            request = tpu_v2.CreateQueuedResourceRequest.from_json(json.dumps(queued_request(launch)))
            try:
                client.create_queued_resource(request=request, timeout=TIMEOUT_SECONDS)
            except client_errors() as error:
                if status_of(error) != "ALREADY_EXISTS":
                    raise
            found = _find(client.get_queued_resource, name)
        if found is None:
            return False
        _check_owner(found.tpu.node_spec[0].node.labels, name, launch)
        return True

    def _take(self, launch: Launch) -> bool:
        """Create the node, unless it is there; True once it is ready. A refusal comes with the operation."""
        from google.cloud import tpu_v2

        name, client = node_name(launch), clients.tpu()
        node = _find(client.get_node, name)
        if node is None:
            _raise_if_refused(name)
            request = tpu_v2.CreateNodeRequest.from_json(json.dumps(node_request(launch)))
            try:
                client.create_node(request=request, timeout=TIMEOUT_SECONDS)
            except client_errors() as error:
                if status_of(error) != "ALREADY_EXISTS":
                    raise
            return False
        _check_owner(node.labels, name, launch)
        return bool(node.state != tpu_v2.Node.State.CREATING)


def tpu_vm_target(spec: JobSpec) -> TpuVmTarget:
    """The spec's target, which is a TPU VM."""
    assert isinstance(spec.target, TpuVmTarget), "TARGETS leads here only what has this type"
    return spec.target


def node_name(launch: Launch) -> str:
    return f"{_location(launch)}/nodes/{names.training_name(launch.run, launch.attempt)}"


def queued_name(launch: Launch) -> str:
    return f"{_location(launch)}/queuedResources/{names.training_name(launch.run, launch.attempt)}"


def disk_name(launch: Launch) -> str:
    zone = _zone(launch)
    return f"projects/{launch.settings.project}/zones/{zone}/disks/{names.training_name(launch.run, launch.attempt)}"


def disk_request(launch: Launch) -> dict[str, Any]:
    """The disks.insert request, as JSON. The disk comes blank; the startup script formats it."""
    target = tpu_vm_target(launch.spec)
    disk = {
        "name": names.training_name(launch.run, launch.attempt),
        "sizeGb": str(target.data_disk_gib),
        "type": f"zones/{_zone(launch)}/diskTypes/{TPU_VMS[target.accelerator_type].disk_type}",
        "labels": _labels(launch),
    }
    return {"requestId": _request_id(launch, "disk"), "disk": disk}


def queued_request(launch: Launch) -> dict[str, Any]:
    """The createQueuedResource request, as JSON."""
    parent, _, name = queued_name(launch).rpartition("/queuedResources/")
    placement = tpu_vm_target(launch.spec).placements[launch.placement]
    wait = launch.settings.provision_deadline_seconds if placement.max_wait is None else seconds(placement.max_wait)
    queued: dict[str, Any] = {
        "tpu": {"nodeSpec": [{"parent": parent, "nodeId": name, "node": node(launch)}]},
        "queueingPolicy": {"validUntilDuration": f"{min(wait, launch.timeout_seconds)}s"},
    }
    if placement.capacity == "spot":
        queued["spot"] = {}
    if placement.capacity == "guaranteed":
        queued["guaranteed"] = {"minDuration": f"{launch.timeout_seconds}s"}
    if placement.reservation:
        zone = f"projects/{launch.settings.project}/locations/{placement.zone}"
        queued["reservationName"] = f"{zone}/reservations/{placement.reservation}"
    return {
        "parent": parent,
        "queuedResourceId": name,
        "requestId": _request_id(launch, "queued-resource"),
        "queuedResource": queued,
    }


def node_request(launch: Launch) -> dict[str, Any]:
    """The createNode request, as JSON."""
    parent, _, name = node_name(launch).rpartition("/nodes/")
    capacity = tpu_vm_target(launch.spec).placements[launch.placement].capacity
    scheduling = {"spot": {"spot": True}, "reservation": {"reserved": True}}.get(capacity)
    wanted = node(launch) | ({"schedulingConfig": scheduling} if scheduling else {})
    return {"parent": parent, "nodeId": name, "node": wanted}


def node(launch: Launch) -> dict[str, Any]:
    """The Node, as JSON: no external address, an account of its own, and a script that is the same for all."""
    target, settings, placement = tpu_vm_target(launch.spec), launch.settings, _placement(launch)
    network = f"projects/{settings.project}/global/networks/{settings.network}"
    subnetwork = f"projects/{settings.project}/regions/{placement.region}/subnetworks/{settings.subnetwork}"
    return {
        "acceleratorType": target.accelerator_type,
        "runtimeVersion": target.runtime_version or TPU_VMS[target.accelerator_type].runtimes[0],
        "networkConfig": {"network": network, "subnetwork": subnetwork, "enableExternalIps": False},
        "serviceAccount": {"email": settings.trainer_service_account, "scope": [CLOUD_PLATFORM]},
        "dataDisks": [{"sourceDisk": disk_name(launch), "mode": "READ_WRITE"}],
        "labels": _labels(launch),
        "metadata": metadata(launch),
    }


def metadata(launch: Launch) -> dict[str, str]:
    """What the startup script goes by; its head says what each key means."""
    settings = launch.settings
    variables = {
        **container_variables(launch),
        "DROPFORGE_GRACE_SECONDS": str(GRACE_SECONDS),
        "DROPFORGE_WORK_DIRECTORY": WORK_DIRECTORY,
    }
    return {
        "startup-script": STARTUP_SCRIPT.read_text(encoding="utf-8"),
        "dropforge-role": "train",
        "dropforge-run": launch.run,
        "dropforge-attempt": str(launch.attempt),
        "dropforge-image": settings.train_maxtext_image,
        "dropforge-env": "\n".join(f"{name}={value}" for name, value in variables.items()),
        "dropforge-secrets": secret_references(launch),
        "dropforge-deadline": str(int(launch.deadline.timestamp())),
        "dropforge-runs-bucket": settings.runs_bucket,
        "dropforge-job-events-topic": settings.topic(settings.job_events_topic),
        "dropforge-data-disk": DATA_DISK,
    }


def status_of_queued(queued: Any, node: Any, name: str) -> Status:
    """What a QueuedResource, and its node, say; either is None when it does not exist."""
    from google.cloud.tpu_v2 import QueuedResourceState

    if queued is None:
        return Status(Phase.GONE, f"{name} does not exist")
    states, state = QueuedResourceState.State, queued.state.state
    if state == states.ACTIVE:
        return status_of_node(node, name)
    if state == states.FAILED:
        return _refused(queued.state.failed_data.error)
    if state in (states.SUSPENDING, states.SUSPENDED):
        return _ended_status(node, name)
    if state == states.DELETING:
        return Status(Phase.GONE, f"{name} is being deleted")
    return Status(Phase.PENDING, f"the queued resource is {states(state).name}", ErrorClass.STOCKOUT)


def status_of_node(node: Any, name: str) -> Status:
    """What a node says by its state; None: it does not exist."""
    from google.cloud.tpu_v2 import Node

    if node is None or node.state == Node.State.DELETING:
        return Status(Phase.GONE, f"{name} {'has no node' if node is None else 'is being deleted'}")
    if node.state == Node.State.CREATING:
        return Status(Phase.PENDING, "the node is being created", ErrorClass.STOCKOUT)
    if node.state in (Node.State.PREEMPTED, Node.State.TERMINATED, Node.State.STOPPING, Node.State.STOPPED):
        return _ended_status(node, name)
    return Status(Phase.RUNNING, node.health_description)


def _ended_status(node: Any, name: str) -> Status:
    """A machine that was taken away: by Google, or by somebody."""
    from google.cloud.tpu_v2 import Node

    if node is not None and node.state == Node.State.PREEMPTED:
        return Status(Phase.FAILED, f"{node.name} was preempted", ErrorClass.PREEMPTED, hint=_RESUMES)
    state = "gone" if node is None else Node.State(node.state).name
    return Status(Phase.FAILED, f"the machine of {name} is {state}", ErrorClass.INFRASTRUCTURE, hint=_RESUMES)


def _refused(error: Any) -> Status:
    """Why a queued resource failed; one that expired found no capacity in its time."""
    from google.rpc import code_pb2

    if error.code == _DEADLINE_EXCEEDED:
        return Status(Phase.FAILED, error.message, ErrorClass.STOCKOUT, hint="add placements in other zones")
    found = classify_text(code_pb2.Code.Name(error.code), error.message)
    return Status(Phase.FAILED, found.message, found.error_class, hint=found.hint)


def _written(launch: Launch) -> Status | None:
    """What the startup script wrote at its end; None while it has not."""
    from google.api_core.exceptions import NotFound

    name = names.machine_object(launch.run, launch.attempt, "status.json")
    try:
        blob = clients.storage().bucket(launch.settings.runs_bucket).blob(name)
        found = json.loads(blob.download_as_bytes(timeout=TIMEOUT_SECONDS))
    except NotFound:
        return None
    ended, code = datetime.fromisoformat(found["time"]), found["exit_code"]
    if found["error_class"] is not None:
        return Status(Phase.FAILED, found["message"], ErrorClass(found["error_class"]), code, ended)
    if code == 0:
        return Status(Phase.SUCCEEDED, exit_code=0, ended=ended)
    return Status(Phase.FAILED, "the container failed", class_of_exit(code), code, ended)


def _raise_if_refused(name: str) -> None:
    """Raise what an earlier creation of a node has ended with: the node is gone, its operation is not."""
    from google.cloud.tpu_v2 import OperationMetadata
    from google.rpc import code_pb2

    parent = name.rsplit("/nodes/", 1)[0]
    for operation in clients.tpu().list_operations({"name": parent}, timeout=TIMEOUT_SECONDS).operations:
        about = OperationMetadata.deserialize(operation.metadata.value)
        if about.target == name and operation.error.code:
            raise classify_text(code_pb2.Code.Name(operation.error.code), operation.error.message)


def _delete_queued(name: str) -> bool:
    """Delete a queued resource with its nodes; True once it does not exist."""
    from google.cloud.tpu_v2 import DeleteQueuedResourceRequest, QueuedResourceState

    client = clients.tpu()
    found = _find(client.get_queued_resource, name)
    if found is None:
        return True
    if found.state.state != QueuedResourceState.State.DELETING:
        request = DeleteQueuedResourceRequest(name=name, force=True)
        _begin(lambda: client.delete_queued_resource(request=request, timeout=TIMEOUT_SECONDS))
    return False


def _delete_node(name: str) -> bool:
    """Delete a node; True once it does not exist. One that a queued resource holds is deleted with that."""
    from google.cloud.tpu_v2 import Node

    client = clients.tpu()
    found = _find(client.get_node, name)
    if found is None:
        return True
    if found.state != Node.State.DELETING and not found.queued_resource:
        _begin(lambda: client.delete_node(name=name, timeout=TIMEOUT_SECONDS))
    return False


def _begin(delete: Callable[[], Any]) -> None:
    """Begin a deletion, unless it is gone by now, or another one has begun."""
    try:
        delete()
    except client_errors() as error:
        if status_of(error) not in ("NOT_FOUND", "FAILED_PRECONDITION", "ABORTED"):
            raise


def _find(get: Callable[..., Any], name: str) -> Any:
    from google.api_core.exceptions import NotFound

    try:
        return get(name=name, timeout=TIMEOUT_SECONDS)
    except NotFound:
        return None


def _check_owner(labels: Any, name: str, launch: Launch) -> None:
    if labels.get(names.RUN_LABEL) != launch.run:
        raise CloudError(
            ErrorClass.CONFIG,
            f"{name} exists and belongs to {dict(labels)!r}",
            "delete it, or drop the spec again to get another run id",
        )


def _labels(launch: Launch) -> dict[str, str]:
    return names.labels(launch.run, launch.spec.labels, **{names.ATTEMPT_LABEL: str(launch.attempt)})


def _request_id(launch: Launch, what: str) -> str:
    return str(uuid.uuid5(_REQUESTS, f"{launch.run}/{launch.attempt}/{what}"))


def _placement(launch: Launch) -> Any:
    return tpu_vm_target(launch.spec).placements[launch.placement]


def _zone(launch: Launch) -> str:
    return str(_placement(launch).zone)


def _location(launch: Launch) -> str:
    return f"projects/{launch.settings.project}/locations/{_zone(launch)}"
