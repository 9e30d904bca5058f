"""Where a run trains: one class per target, with everything that only this target has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..catalog import (
    ACCELERATORS,
    CLOUD_RUN_MACHINES,
    GKE_ACCELERATORS,
    GKE_TPUS,
    TPU_VMS,
    TpuSlice,
    tpu_slice,
)
from .parts import Duration, Part, Region, Wrong, Zone

# A Compute Engine reservation: https://cloud.google.com/compute/docs/reference/rest/v1/reservations
Reservation = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")]
# https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1/projects.locations.clusters (at most 40 characters)
ClusterName = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")]
Capacity = Literal["on_demand", "spot", "flex_start", "reservation"]


class Placement(Part):
    """Where an attempt may run; tried in the order given."""

    region: Region
    max_wait: Duration | None = Field(
        default=None, description="How long capacity is waited for before the next placement; default: 30m."
    )


class CloudRunTarget(Part):
    """A Cloud Run job with one GPU (https://cloud.google.com/run/docs/configuring/jobs/gpu)."""

    type: Literal["cloud_run"]
    accelerator: str = "nvidia-l4"
    cpu: int = Field(default=8, ge=1, le=64)
    memory_gib: int = Field(default=32, ge=1, le=512)
    zonal_redundancy: bool = False
    placements: list[Placement] = Field(min_length=1, max_length=20)
    price_usd_per_hour: float | None = Field(default=None, gt=0, description="Your price, where ours is unknown.")

    @model_validator(mode="after")
    def _cloud_run_offers_it(self) -> CloudRunTarget:
        check_cloud_run_machine(self.accelerator, self.cpu, self.memory_gib)
        for index, placement in enumerate(self.placements):
            check_cloud_run_region(self.accelerator, placement.region, f"/placements/{index}/region")
        return self


class GkePlacement(Placement):
    """A region of GKE and the kind of capacity that is asked for there."""

    capacity: Capacity = "on_demand"
    reservation: Reservation | None = Field(default=None, description="A specific reservation, by its name.")

    @model_validator(mode="after")
    def _names_its_reservation(self) -> GkePlacement:
        if (self.capacity == "reservation") != (self.reservation is not None):
            found = {"capacity": self.capacity, "reservation": self.reservation}
            raise Wrong("", "capacity and reservation do not agree", found, "capacity 'reservation' with a name")
        return self


class GkeCluster(Part):
    """A standing cluster by its name, the same in every region; or one that lives only as long as the attempt."""

    name: ClusterName | None = Field(default=None, description="Default: the deployment's own cluster.")
    create: bool = Field(default=False, description="Make an Autopilot cluster for the attempt, and delete it.")

    @model_validator(mode="after")
    def _exists_or_is_made(self) -> GkeCluster:
        if self.create and self.name is not None:
            raise Wrong("/name", "a cluster that the run makes is named after the run", self.name, "no name")
        return self


class GkeTarget(Part):
    """A Kubernetes Job on GKE Autopilot: one or several nodes with the same GPUs, sharded by FSDP2."""

    type: Literal["gke"]
    accelerator: str = "nvidia-l4"
    accelerator_count: int = Field(default=1, ge=1, le=16, description="GPUs of each node; one process per GPU.")
    nodes: int = Field(default=1, ge=1, le=64)
    cluster: GkeCluster = GkeCluster()
    cpu: int | None = Field(default=None, ge=1, le=224, description="Of each node; default: Autopilot's for the GPU.")
    memory_gib: int | None = Field(default=None, ge=1, le=4000, description="Of each node; default: likewise.")
    shared_memory_gib: int = Field(default=16, ge=1, le=1000, description="/dev/shm, which counts as memory.")
    ephemeral_storage_gib: int = Field(default=100, ge=10, le=6000, description="For weights, data and checkpoints.")
    placements: list[GkePlacement] = Field(min_length=1, max_length=20)
    price_usd_per_hour: float | None = Field(default=None, gt=0, description="Of all nodes, where ours is unknown.")

    @model_validator(mode="after")
    def _gke_offers_it(self) -> GkeTarget:
        check_gke_accelerator(self.accelerator, self.accelerator_count)
        return self


class TpuVmPlacement(Part):
    """A zone with TPUs and the kind of capacity that is asked for there."""

    zone: Zone
    capacity: Literal["on_demand", "spot", "guaranteed", "reservation"] = "on_demand"
    reservation: Reservation | None = Field(default=None, description="A specific reservation, by its name.")
    max_wait: Duration | None = Field(
        default=None, description="How long capacity is waited for before the next placement; default: 30m."
    )

    @property
    def region(self) -> str:
        """The zone's region."""
        return self.zone.rsplit("-", 1)[0]

    @model_validator(mode="after")
    def _names_its_reservation(self) -> TpuVmPlacement:
        if self.reservation is not None and self.capacity != "reservation":
            found = {"capacity": self.capacity, "reservation": self.reservation}
            raise Wrong("", "capacity and reservation do not agree", found, "capacity 'reservation' with a name")
        return self


class TpuVmTarget(Part):
    """MaxText on one Cloud TPU VM, without SSH (https://cloud.google.com/tpu/docs/queued-resources)."""

    type: Literal["tpu_vm"]
    accelerator_type: str = Field(default="v5litepod-8", examples=["v5litepod-8", "v6e-4"])
    runtime_version: str | None = Field(default=None, description="Default: by the accelerator type.")
    queued: bool = Field(default=True, description="Wait for capacity in Google's queue; false: take it now or fail.")
    data_disk_gib: int = Field(default=200, ge=10, le=65536, description="For weights, data and checkpoints.")
    placements: list[TpuVmPlacement] = Field(min_length=1, max_length=20)
    price_usd_per_hour: float | None = Field(default=None, gt=0, description="Of the machine, where ours is unknown.")

    @model_validator(mode="after")
    def _cloud_tpu_offers_it(self) -> TpuVmTarget:
        check_tpu_vm(self.accelerator_type, self.runtime_version)
        for index, placement in enumerate(self.placements):
            self._check_placement(placement, f"/placements/{index}")
        return self

    def _check_placement(self, placement: TpuVmPlacement, pointer: str) -> None:
        check_tpu_vm_zone(self.accelerator_type, placement.zone, f"{pointer}/zone")
        if placement.capacity == "guaranteed" and not self.queued:
            raise Wrong(f"{pointer}/capacity", "only the queue guarantees", "guaranteed", "queued: true")
        check_tpu_vm_reservation(placement.capacity, placement.reservation, self.queued, pointer)


class RayTarget(Part):
    """MaxText on one slice of TPU hosts of a GKE cluster with the Ray operator (KubeRay), by Ray Train."""

    type: Literal["ray"]
    accelerator: str = Field(default="tpu-v6e-slice", description="GKE's name of the TPU generation.")
    topology: str = Field(default="4x4", description="Chips of the slice; hosts and their chips follow from it.")
    cluster: GkeCluster = GkeCluster()
    head_cpu: int = Field(default=16, ge=1, le=222, description="The head converts weights and drives training.")
    head_memory_gib: int = Field(default=100, ge=1, le=1000, description="It holds the model twice, in 32 bits.")
    head_storage_gib: int = Field(default=200, ge=10, le=6000, description="For weights before and after training.")
    placements: list[GkePlacement] = Field(min_length=1, max_length=20)
    price_usd_per_hour: float | None = Field(default=None, gt=0, description="Of all hosts, where ours is unknown.")

    @property
    def slice(self) -> TpuSlice:
        """Hosts and chips of the topology."""
        found = tpu_slice(self.accelerator, self.topology)
        assert found is not None, "validated"
        return found

    @model_validator(mode="after")
    def _gke_offers_it(self) -> RayTarget:
        known = GKE_TPUS.get(self.accelerator)
        if known is None:
            expected = f"one of {', '.join(sorted(GKE_TPUS))}"
            raise Wrong("/accelerator", "GKE does not offer this TPU", self.accelerator, expected)
        if tpu_slice(self.accelerator, self.topology) is None:
            raise Wrong("/topology", f"{self.accelerator} has no such slice", self.topology, known.expected)
        return self


def accelerators_of(target: CloudRunTarget | GkeTarget | TpuVmTarget | RayTarget) -> tuple[int, str, float]:
    """What an attempt trains on: how many accelerators (or TPU slices), their name, and their memory in GiB in all."""
    if isinstance(target, TpuVmTarget):
        slice_ = TPU_VMS[target.accelerator_type]
        return 1, target.accelerator_type, slice_.chips * slice_.memory_gib
    if isinstance(target, RayTarget):
        chips = target.slice.hosts * target.slice.chips
        return 1, f"{target.accelerator} {target.topology}", chips * GKE_TPUS[target.accelerator].memory_gib
    count = target.accelerator_count * target.nodes if isinstance(target, GkeTarget) else 1
    return count, target.accelerator, count * ACCELERATORS[target.accelerator].memory_gib


def check_cloud_run_machine(accelerator: str, cpu: int, memory_gib: int) -> None:
    """Raise Wrong unless Cloud Run offers `accelerator` with that much CPU and memory."""
    known = CLOUD_RUN_MACHINES.get(accelerator)
    if known is None:
        expected = f"one of {', '.join(sorted(CLOUD_RUN_MACHINES))}"
        raise Wrong("/accelerator", "Cloud Run does not offer this accelerator", accelerator, expected)
    if cpu < known.min_cpu:
        raise Wrong("/cpu", f"too little for {accelerator}", cpu, f"at least {known.min_cpu}")
    if memory_gib < known.min_memory_gib:
        raise Wrong("/memory_gib", f"too little for {accelerator}", memory_gib, f"at least {known.min_memory_gib}")


def check_cloud_run_region(accelerator: str, region: str, pointer: str) -> None:
    """Raise Wrong, at `pointer`, unless Cloud Run has `accelerator` in `region`."""
    regions = CLOUD_RUN_MACHINES[accelerator].regions
    if region not in regions:
        raise Wrong(pointer, f"Cloud Run does not offer {accelerator} there", region, f"one of {', '.join(regions)}")


def check_gke_accelerator(accelerator: str, count: int) -> None:
    """Raise Wrong unless Autopilot offers nodes with `count` of `accelerator`."""
    counts = GKE_ACCELERATORS.get(accelerator)
    if counts is None:
        expected = f"one of {', '.join(sorted(GKE_ACCELERATORS))}"
        raise Wrong("/accelerator", "GKE Autopilot does not offer this accelerator", accelerator, expected)
    if count not in counts:
        expected = f"one of {', '.join(map(str, counts))}"
        raise Wrong("/accelerator_count", f"GKE Autopilot has no node with so many {accelerator}", count, expected)


def check_tpu_vm(accelerator_type: str, runtime_version: str | None) -> None:
    """Raise Wrong unless a TPU VM of one machine has the type, and boots the runtime; None is its default."""
    known = TPU_VMS.get(accelerator_type)
    if known is None:
        message, expected = "no TPU VM of one machine has this type", f"one of {', '.join(sorted(TPU_VMS))}"
        raise Wrong("/accelerator_type", message, accelerator_type, expected)
    if runtime_version not in (None, *known.runtimes):
        message, expected = f"does not boot on {accelerator_type}", f"one of {', '.join(known.runtimes)}"
        raise Wrong("/runtime_version", message, runtime_version, expected)


def check_tpu_vm_zone(accelerator_type: str, zone: str, pointer: str) -> None:
    """Raise Wrong at `pointer` unless the zone has TPU VMs of the type, which is known."""
    zones = TPU_VMS[accelerator_type].zones
    if zone not in zones:
        message = f"Cloud TPU does not offer {accelerator_type} there"
        raise Wrong(pointer, message, zone, f"one of {', '.join(zones)}")


def check_tpu_vm_reservation(capacity: str, reservation: str | None, queued: bool, pointer: str) -> None:
    """Raise Wrong below `pointer` unless the reservation is named where, and only where, the API can use its name."""
    if reservation is not None and not queued:
        message = "a node that is not queued cannot name its reservation"
        raise Wrong(f"{pointer}/reservation", message, reservation, "no name, or queued: true")
    if capacity == "reservation" and reservation is None and queued:
        raise Wrong(f"{pointer}/reservation", "a required field is missing", None, "the reservation's name")
