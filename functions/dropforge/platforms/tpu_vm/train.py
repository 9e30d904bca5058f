"""Target `tpu_vm`: one TPU VM per attempt, queued for capacity or created at once, and a data disk for the attempt.

The machine runs startup.sh with metadata values as its parameters; nobody logs in to the machine. A node has no exit
status. The attempt's end is read from the status that the script writes beside the run, and from the node's state.
API: https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from dropforge.base import names
from dropforge.base.errors import ErrorClass
from dropforge.base.settings import Settings
from dropforge.cloud import tpu
from dropforge.cloud.classify import classify, classify_text, client_errors
from dropforge.cloud.context import Cloud
from dropforge.cloud.disks import DISK, delete_disk, ensure_disk, list_disks
from dropforge.cloud.listing import Listed, list_places
from dropforge.cloud.resource import Resource
from dropforge.cloud.run_access import REQUEST_VARIABLE, URL_VARIABLE
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.serving import Deployment, server_environment
from dropforge.platforms.training import (
    Launch,
    Phase,
    Status,
    Target,
    Waits,
    access_variables,
    class_of_exit,
    container_variables,
    run_labels,
    secret_references,
)
from dropforge.spec import JobSpec, seconds, serving_seconds

from .catalog import TPU_VMS, tpu_vm_price
from .spec import TpuVmTarget, TrainingVmServe
from .written import read_written

STARTUP_SCRIPT = Path(__file__).with_name("startup.sh")
GRACE_SECONDS = 25  # of the 30 s between a preemption and the end
# Compute Engine's name for the first disk that is attached without a name.
DATA_DISK = "persistent-disk-1"
_KILLED = (137, 143)  # exit codes of a container that a signal from outside has ended
_DEADLINE_EXCEEDED = 4  # google.rpc.Code
# What the states of a queued resource mean: https://cloud.google.com/tpu/docs/queued-resources
_QUEUE = {
    "CREATING": "Cloud TPU has received the request",
    "ACCEPTED": "Cloud TPU has accepted the request and has not begun to create the machine",
    "WAITING_FOR_RESOURCES": "Cloud TPU has no capacity for it yet",
    "PROVISIONING": "Cloud TPU has capacity and creates the machine",
}
_RESUMES = "training resumes from its last checkpoint"


class TpuVms(Target):
    """See `Target` for the contract of each verb."""

    def regions(self, spec: JobSpec) -> list[str]:
        return [placement.zone for placement in tpu_vm_target(spec).placements]

    def price(self, spec: JobSpec, placement: int) -> HourlyPrice:
        target = tpu_vm_target(spec)
        if target.price_usd_per_hour is not None:
            return HourlyPrice(target.price_usd_per_hour, None, "target.price_usd_per_hour in the spec")
        where = target.placements[placement]
        return tpu_vm_price(target.accelerator_type, where.zone, where.capacity, "target.price_usd_per_hour")

    def resources(self, launch: Launch) -> list[Resource]:
        return [Resource(DISK, disk_name(launch), disk_request(launch)), *tpu.resources(machine(launch))]

    def provision(self, cloud: Cloud, launch: Launch) -> Waits | None:
        wanted = machine(launch)
        if not ensure_disk(cloud, disk_name(launch), disk_request(launch)):
            return Waits(f"the disk {disk_name(launch)} is being created")
        return None if tpu.ensure(cloud, wanted) else Waits(being_created(wanted))

    def inspect(self, cloud: Cloud, launch: Launch) -> Status:
        wanted = machine(launch)
        try:
            queued, node = tpu.find_machine(cloud, wanted)
            status = status_of(queued, node, wanted)
            # The written status outlives the machine, and says more than the machine's state.
            written = _written(cloud, launch) if node is not None else None
            return _with_preemption(written, status) if written else status
        except client_errors() as error:
            raise classify(error) from error

    def listed(self, cloud: Cloud) -> Iterator[Listed]:
        lists = (tpu.list_queued, tpu.list_nodes, list_disks)
        is_used = bool(cloud.settings.train_maxtext_image)
        resources = list_places(cloud, lists, lambda list_zones: list_zones(cloud), is_used=is_used)
        yield from (resource for resource in resources if names.ATTEMPT_LABEL in resource.labels)

    def teardown(self, cloud: Cloud, kind: str, name: str) -> bool:
        return delete_disk(cloud, name) if kind == DISK else tpu.delete(cloud, kind, name)


def tpu_vm_target(spec: JobSpec) -> TpuVmTarget:
    """The spec's target as a TpuVmTarget."""
    assert isinstance(spec.target, TpuVmTarget), "the registry gives this target only specs of its type"
    return spec.target


def node_name(launch: Launch) -> str:
    return f"{_location(launch)}/nodes/{names.training_name(launch.run, launch.attempt)}"


def queued_name(launch: Launch) -> str:
    return f"{_location(launch)}/queuedResources/{names.training_name(launch.run, launch.attempt)}"


def disk_name(launch: Launch) -> str:
    zone = _zone(launch)
    return f"projects/{launch.settings.project}/zones/{zone}/disks/{names.training_name(launch.run, launch.attempt)}"


def disk_request(launch: Launch) -> dict[str, Any]:
    """The disks.insert request as JSON. The new disk is blank; the startup script formats it."""
    target = tpu_vm_target(launch.spec)
    disk: dict[str, Any] = {
        "name": names.training_name(launch.run, launch.attempt),
        "sizeGb": str(target.data_disk_gib),
        "type": f"zones/{_zone(launch)}/diskTypes/{TPU_VMS[target.accelerator_type].disk_type}",
        "labels": run_labels(launch),
    }
    return {"requestId": tpu.request_id(disk["name"], "disk"), "disk": disk}


def machine(launch: Launch) -> tpu.Machine:
    """The attempt's machine."""
    target, settings, placement = tpu_vm_target(launch.spec), launch.settings, _placement(launch)
    server = _server(launch)
    serves = int((server.expires - launch.deadline).total_seconds()) if server else 0
    wait = settings.provision_deadline_seconds if placement.max_wait is None else seconds(placement.max_wait)
    return tpu.Machine(
        settings=settings,
        run=launch.run,
        node=node_name(launch),
        queued=queued_name(launch) if target.queued else "",
        accelerator_type=target.accelerator_type,
        runtime_version=target.runtime_version or TPU_VMS[target.accelerator_type].runtimes[0],
        capacity=placement.capacity,
        reservation=placement.reservation,
        wait_seconds=min(wait, launch.timeout_seconds),
        use_seconds=launch.timeout_seconds + serves,
        service_account=settings.trainer_service_account,
        labels={**run_labels(launch), **({names.EXPIRES_LABEL: _unix(server.expires)} if server else {})},
        metadata=metadata(launch),
        data_disk=disk_name(launch),
        tags=(tpu.SERVER_TAG,) if server else (),
    )


def metadata(launch: Launch) -> dict[str, str]:
    """The parameters of the startup script. The comment at its top explains each key."""
    settings = launch.settings
    variables = {
        **container_variables(launch),
        "DROPFORGE_GRACE_SECONDS": str(GRACE_SECONDS),
        "DROPFORGE_WORK_DIRECTORY": tpu.WORK_DIRECTORY,
    }
    if launch.spec.secrets:
        variables["DROPFORGE_SECRETS"] = secret_references(launch)
    server = _server(launch)
    return {
        "startup-script": STARTUP_SCRIPT.read_text(encoding="utf-8"),
        "dropforge-role": "train",
        "dropforge-run": launch.run,
        "dropforge-attempt": str(launch.attempt),
        "dropforge-image": settings.train_maxtext_image,
        "dropforge-env": "\n".join(f"{name}={value}" for name, value in variables.items()),
        "dropforge-deadline": _unix(launch.deadline),
        "dropforge-runs-bucket": settings.runs_bucket,
        **key_metadata(launch.run, settings, launch.key),
        "dropforge-job-events-topic": settings.topic(settings.job_events_topic),
        "dropforge-data-disk": DATA_DISK,
        **(_server_metadata(server) if server else {}),
    }


def key_metadata(run: str, settings: Settings, key: str) -> dict[str, str]:
    """The variables with which the startup script proves its run, and asks for access to the run's objects."""
    variables = access_variables(run, settings, key)
    access = (
        {
            "dropforge-access-url": variables[URL_VARIABLE],
            "dropforge-access-request": variables[REQUEST_VARIABLE],
        }
        if variables
        else {}
    )
    return {**({"dropforge-run-key": key} if key else {}), **access}


def _server(launch: Launch) -> Deployment | None:
    """The endpoint that the machine becomes after training, if the spec keeps it; `expires` is its latest end."""
    spec = launch.spec
    if not isinstance(spec.serve, TrainingVmServe):
        return None
    expires = launch.deadline + timedelta(seconds=serving_seconds(spec.serve))
    return Deployment(launch.run, spec, launch.settings, expires, launch)


def _server_metadata(server: Deployment) -> dict[str, str]:
    serve = server.spec.serve
    assert isinstance(serve, TrainingVmServe), "only this endpoint keeps the machine"
    environment = server_environment(server, serve.max_model_len, serve.max_num_seqs)
    return {
        "dropforge-server-image": server.settings.serve_vllm_tpu_image,
        "dropforge-server-env": tpu.server_variables(
            environment, TPU_VMS[tpu_vm_target(server.spec).accelerator_type].chips
        ),
        "dropforge-server-deadline": _unix(server.expires),
    }


def _unix(time: datetime) -> str:
    return str(int(time.timestamp()))


def status_of(queued: Any, node: Any, machine: tpu.Machine) -> Status:
    """The status of a machine, by its QueuedResource (if it is queued) and its Node; None for what does not exist."""
    from google.cloud.tpu_v2 import QueuedResourceState

    if not machine.queued:
        return status_of_node(node, machine.node)
    name = machine.queued
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
    meaning = _QUEUE.get(states(state).name, "")
    message = f"the queued resource is {states(state).name}{f': {meaning}' if meaning else ''}"
    return Status(Phase.PENDING, message, ErrorClass.STOCKOUT)


def status_of_node(node: Any, name: str) -> Status:
    """The status of a node, by its state. None: the node does not exist."""
    from google.cloud.tpu_v2 import Node

    if node is None or node.state == Node.State.DELETING:
        return Status(Phase.GONE, f"{name} {'has no node' if node is None else 'is being deleted'}")
    if node.state == Node.State.CREATING:
        return Status(Phase.PENDING, "the node is being created", ErrorClass.STOCKOUT)
    if node.state in (Node.State.PREEMPTED, Node.State.TERMINATED, Node.State.STOPPING, Node.State.STOPPED):
        return _ended_status(node, name)
    return Status(Phase.RUNNING, node.health_description)


def being_created(machine: tpu.Machine) -> str:
    """Why a machine that was requested does not exist yet."""
    return f"the {'queued resource' if machine.queued else 'node'} {machine.queued or machine.node} is being created"


def _ended_status(node: Any, name: str) -> Status:
    """The status of a machine that Google preempted, or that a user stopped or deleted."""
    from google.cloud.tpu_v2 import Node

    if node is not None and node.state == Node.State.PREEMPTED:
        return Status(Phase.FAILED, f"{node.name} was preempted", ErrorClass.PREEMPTED, hint=_RESUMES)
    state = "gone" if node is None else Node.State(node.state).name
    return Status(Phase.FAILED, f"the machine of {name} is {state}", ErrorClass.INFRASTRUCTURE, hint=_RESUMES)


def _refused(error: Any) -> Status:
    """Why a queued resource failed. A deadline that passed means that there was no capacity in time."""
    from google.rpc import code_pb2

    if error.code == _DEADLINE_EXCEEDED:
        return Status(Phase.FAILED, error.message, ErrorClass.STOCKOUT, hint="add placements in other zones")
    classified = classify_text(code_pb2.Code.Name(error.code), error.message)
    return Status(Phase.FAILED, classified.message, classified.error_class, hint=classified.hint)


def _written(cloud: Cloud, launch: Launch) -> Status | None:
    """The status that the startup script writes at the end; None before."""
    name = names.machine_object(launch.run, launch.attempt, "status.json")
    written = read_written(cloud, launch.settings.runs_bucket, name, launch.run, launch.attempt, launch.key)
    if written is None:
        return None
    ended, code = written.time, written.exit_code
    if written.error_class is not None:
        return Status(Phase.FAILED, written.message, written.error_class, code, ended)
    if code is None:
        return None
    if code == 0:
        return Status(Phase.SUCCEEDED, exit_code=0, ended=ended)
    return Status(Phase.FAILED, "the container failed", class_of_exit(code), code, ended)


def _with_preemption(written: Status, machine: Status) -> Status:
    """The written status; for a container that was killed on a preempted machine, the preemption.

    A machine that is taken away ends its container, and does not always tell the script why.
    """
    is_killed = written.error_class is ErrorClass.INFRASTRUCTURE and written.exit_code in _KILLED
    if is_killed and machine.error_class is ErrorClass.PREEMPTED:
        return replace(machine, exit_code=written.exit_code, ended=written.ended)
    return written


def _placement(launch: Launch) -> Any:
    return tpu_vm_target(launch.spec).placements[launch.placement]


def _zone(launch: Launch) -> str:
    return str(_placement(launch).zone)


def _location(launch: Launch) -> str:
    return f"projects/{launch.settings.project}/locations/{_zone(launch)}"
