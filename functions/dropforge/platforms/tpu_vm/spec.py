"""The spec's classes for Cloud TPU VMs: `target.type` 'tpu_vm', `serve.type` 'tpu_vm' and 'training_vm'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from dropforge.base.changes import evolve
from dropforge.base.errors import SpecProblem
from dropforge.platforms.images import attention_problems
from dropforge.platforms.maxtext import check_image, check_training
from dropforge.spec.demand import Demand
from dropforge.spec.guess import one_of
from dropforge.spec.job_spec import Accelerators, ServeSpec, TargetSpec, one_sold
from dropforge.spec.machine import Machine, gib
from dropforge.spec.parts import ZONE, Duration, Part, Reservation, Wrong, Zone, one_meant

from .catalog import TPU_VMS, tpu_vm_quota

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from dropforge.base.settings import Settings
    from dropforge.spec import JobSpec


# Of the boot disk, which has 100 GB: the system and the server's image take the rest (an estimate).
BOOT_DISK_FREE_GIB = 60
_ZONES = tuple(dict.fromkeys(zone for known in TPU_VMS.values() for zone in known.zones))
TpuZone = Annotated[Zone, one_meant(ZONE, _ZONES)]


class TpuVmPlacement(Part):
    """A zone with TPUs and the kind of capacity to request there."""

    zone: TpuZone = Field(description="A zone of Google Cloud.")
    capacity: Literal["on_demand", "spot", "guaranteed", "reservation"] = Field(
        default="on_demand", description="on_demand, spot, guaranteed (the queue only), or a reservation."
    )
    reservation: Reservation | None = Field(default=None, description="A specific reservation, by its name.")
    max_wait: Duration | None = Field(
        default=None,
        description="How long an attempt waits for capacity before it tries the next placement; default: 30m.",
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


class TpuVmTarget(TargetSpec):
    """MaxText on one Cloud TPU VM, without SSH (https://cloud.google.com/tpu/docs/queued-resources)."""

    trainer = "maxtext"
    placement_key = "zone"

    type: Literal["tpu_vm"] = Field(description="A Cloud TPU VM.")
    accelerator_type: str = Field(
        default="v5litepod-8",
        examples=["v5litepod-8", "v6e-4"],
        description="Generation and size, by the TPU API's name. It must be one machine.",
    )
    runtime_version: str | None = Field(default=None, description="Default: by the accelerator type.")
    queued: bool = Field(
        default=True, description="True: wait for capacity in Google's queue. False: fail if there is no capacity now."
    )
    data_disk_gib: int = Field(default=200, ge=10, le=65536, description="Space for weights, data and checkpoints.")
    placements: list[TpuVmPlacement] = Field(
        min_length=1, max_length=20, description="Zones and capacities, in the order in which attempts try them."
    )
    price_usd_per_hour: float | None = Field(
        default=None, gt=0, le=1_000_000, description="Price of the machine, if dropforge does not know it."
    )

    @model_validator(mode="after")
    def _cloud_tpu_offers_it(self) -> TpuVmTarget:
        check_tpu_vm(type(self), self.accelerator_type, self.runtime_version)
        for index, placement in enumerate(self.placements):
            self._check_placement(placement, f"/placements/{index}")
        return self

    def _check_placement(self, placement: TpuVmPlacement, pointer: str) -> None:
        check_tpu_vm_zone(self.accelerator_type, placement.zone, f"{pointer}/zone")
        if placement.capacity == "guaranteed" and not self.queued:
            raise Wrong(f"{pointer}/capacity", "only the queue guarantees", "guaranteed", "queued: true")
        check_tpu_vm_reservation(placement.capacity, placement.reservation, self.queued, pointer)

    @classmethod
    def sold(cls) -> Collection[str]:
        return TPU_VMS

    @property
    def start_seconds(self) -> int:
        return 180

    @property
    def accelerators(self) -> Accelerators:
        slice_ = TPU_VMS[self.accelerator_type]
        return Accelerators(1, self.accelerator_type, slice_.chips * slice_.memory_gib)

    @property
    def storage_gib(self) -> int:
        return self.data_disk_gib

    @property
    def machine(self) -> Machine:
        return _machine(self.accelerator_type, self.data_disk_gib, "data_disk_gib")

    def larger(self) -> Iterator[TpuVmTarget]:
        zones = {placement.zone for placement in self.placements}
        for name in _larger_machines(self.accelerator_type):
            if zones <= set(TPU_VMS[name].zones):
                yield evolve(self, accelerator_type=name)

    @property
    def offered_places(self) -> tuple[str, ...]:
        return TPU_VMS[self.accelerator_type].zones

    def demands(self) -> Iterator[Demand]:
        for placement in self.placements:
            yield _demand(self.accelerator_type, placement.zone, placement.capacity)

    def missing(self, job: JobSpec, settings: Settings) -> Iterator[SpecProblem]:
        return check_image(settings, "train_maxtext_image", "/target/type", self.type)

    def machine_problems(self, job: JobSpec) -> Iterator[SpecProblem]:
        yield from attention_problems("train_maxtext", job)

    def check(self, job: JobSpec) -> None:
        check_training(job)
        super().check(job)


class OneMachine(ServeSpec):
    """An endpoint on one machine, which does not scale."""

    streams_weights = False

    def missing(self, job: JobSpec, settings: Settings) -> Iterator[SpecProblem]:
        return check_image(settings, "serve_vllm_tpu_image", "/serve/type", self.type)

    @property
    def min_instances(self) -> int:
        """The machine is always there."""
        return 1

    @property
    def max_instances(self) -> int:
        """There is never a second machine."""
        return 1


class TrainingVmServe(OneMachine):
    """A vLLM endpoint on the TPU VM that trained the model: no second machine and no second wait for capacity."""

    keeps_machine = True
    credential = "none"  # the server runs as the trainer, which may not read the key of all endpoints

    type: Literal["training_vm"] = Field(description="The TPU VM that trained.")
    max_model_len: int = Field(default=2048, ge=16, le=1_048_576, description="Tokens of prompt plus answer.")
    max_num_seqs: int = Field(default=32, ge=1, le=1000, description="Requests served at once.")
    startup_timeout: Duration = Field(default="30m", description="From the end of the training to an answer.")
    ttl: Duration = Field(default="24h", description="How long the endpoint lives after it is ready.")

    def machine(self, job: JobSpec) -> Machine:
        return job.target.machine

    @classmethod
    def no_name(cls) -> str:
        return f"{super().no_name()}: the machine is its run's, and is deleted with what the run leaves"

    def check(self, job: JobSpec) -> None:
        if not isinstance(job.target, TpuVmTarget):
            expected = "target.type 'tpu_vm', or another endpoint"
            raise Wrong("/serve/type", "only a TPU VM can serve after it has trained", self.type, expected)


class TpuVmServe(OneMachine):
    """A vLLM endpoint on its own Cloud TPU VM of one machine. Only clients in the VPC reach it."""

    takes_names = True

    type: Literal["tpu_vm"] = Field(description="A separate Cloud TPU VM.")
    accelerator_type: str = Field(
        default="v5litepod-8", description="Generation and size, by the TPU API's name. The model is on all chips."
    )
    runtime_version: str | None = Field(default=None, description="Default: by the accelerator type.")
    zone: TpuZone | None = Field(default=None, description="Default: the first placement of a target of this type.")
    queued: bool = Field(
        default=True, description="True: wait for capacity in Google's queue. False: fail if there is no capacity now."
    )
    capacity: Literal["on_demand", "spot", "reservation"] = Field(
        default="on_demand", description="on_demand, spot, or a reservation."
    )
    reservation: Reservation | None = Field(default=None, description="A specific reservation, by its name.")
    max_model_len: int = Field(default=2048, ge=16, le=1_048_576, description="Tokens of prompt plus answer.")
    max_num_seqs: int = Field(default=32, ge=1, le=1000, description="Requests served at once.")
    startup_timeout: Duration = Field(default="45m", description="From the request to an answer, the queue included.")
    ttl: Duration = Field(default="24h", description="How long the endpoint lives after it is ready.")
    price_usd_per_hour: float | None = Field(
        default=None, gt=0, le=1_000_000, description="Price of the machine, if dropforge does not know it."
    )

    @model_validator(mode="after")
    def _cloud_tpu_offers_it(self) -> TpuVmServe:
        check_tpu_vm(type(self), self.accelerator_type, self.runtime_version)
        if self.zone is not None:
            check_tpu_vm_zone(self.accelerator_type, self.zone, "/zone")
        if self.reservation is not None and self.capacity != "reservation":
            found = {"capacity": self.capacity, "reservation": self.reservation}
            raise Wrong("", "capacity and reservation do not agree", found, "capacity 'reservation' with a name")
        check_tpu_vm_reservation(self.capacity, self.reservation, self.queued, "")
        return self

    def check(self, job: JobSpec) -> None:
        if self.zone is not None:
            return
        if not isinstance(job.target, TpuVmTarget):
            message, expected = "a required field is missing", "the zone of the endpoint's TPU VM"
            raise Wrong("/serve/zone", message, None, f"{expected}: the target is in none")
        check_tpu_vm_zone(self.accelerator_type, job.target.placements[0].zone, "/serve/zone")

    @classmethod
    def sold(cls) -> Collection[str]:
        return TPU_VMS

    def machine(self, job: JobSpec) -> Machine:
        return _machine(self.accelerator_type, BOOT_DISK_FREE_GIB)

    def larger(self) -> Iterator[TpuVmServe]:
        for name in _larger_machines(self.accelerator_type):
            yield evolve(self, accelerator_type=name)

    def demands(self, job: JobSpec) -> Iterator[Demand]:
        zone = self.zone
        if zone is None and isinstance(job.target, TpuVmTarget):
            zone = job.target.placements[0].zone
        if zone is not None:
            yield _demand(self.accelerator_type, zone, self.capacity, 2 if self.is_named else 1)

    def why_unnamed(self, settings: Settings) -> str:
        if not settings.endpoint_domain:
            return "this deployment has no private zone for the names of endpoints (Terraform: endpoint_domain)"
        return ""

    def missing(self, job: JobSpec, settings: Settings) -> Iterator[SpecProblem]:
        yield from super().missing(job, settings)
        if self.endpoint and (problem := self.why_unnamed(settings)):
            expected = "no name, or a domain in endpoint_domain and `make deploy`: 0.20 USD a month"
            yield SpecProblem("/serve/endpoint", problem, self.endpoint, expected)

    @classmethod
    def no_canary(cls) -> str:
        return f"serve.type {cls.type_name()} cannot give a model a share of the requests: a name has one address"


def _machine(accelerator_type: str, disk_gib: int, disk_field: str = "") -> Machine:
    known = TPU_VMS[accelerator_type]
    return Machine(
        accelerator=accelerator_type,
        accelerators=known.chips,
        accelerator_bytes=gib(known.memory_gib),
        host_bytes=known.host_memory_gb * 10**9,
        disk_bytes=gib(disk_gib),
        disk_field=disk_field,
    )


def _larger_machines(accelerator_type: str) -> list[str]:
    """The types whose chips together have more memory, the smallest first."""

    def memory(name: str) -> float:
        return TPU_VMS[name].chips * TPU_VMS[name].memory_gib

    return [name for name in sorted(TPU_VMS, key=memory) if memory(name) > memory(accelerator_type)]


def _demand(accelerator_type: str, zone: str, capacity: str, machines: int = 1) -> Demand:
    chips, quota = TPU_VMS[accelerator_type].chips, tpu_vm_quota(accelerator_type, zone, capacity)
    return Demand(accelerator_type, chips * machines, zone, quota, capacity, listed_by="tpu")


def check_tpu_vm(cls: type[TpuVmTarget | TpuVmServe], accelerator_type: str, runtime_version: str | None) -> None:
    """Raise Wrong unless the type is a TPU VM of one machine that boots the runtime. None is the default runtime."""
    known = TPU_VMS.get(accelerator_type)
    if known is None:
        message, expected = "not the type of a TPU VM of one machine", one_sold(accelerator_type, cls)
        raise Wrong("/accelerator_type", message, accelerator_type, expected)
    if runtime_version not in (None, *known.runtimes):
        message, expected = f"does not boot on {accelerator_type}", one_of(runtime_version, known.runtimes)
        raise Wrong("/runtime_version", message, runtime_version, expected)


def check_tpu_vm_zone(accelerator_type: str, zone: str, pointer: str) -> None:
    """Raise Wrong at `pointer` unless the zone has TPU VMs of the type. The type is in the catalog."""
    zones = TPU_VMS[accelerator_type].zones
    if zone not in zones:
        message = f"Cloud TPU does not offer {accelerator_type} there"
        raise Wrong(pointer, message, zone, one_of(zone, zones))


def check_tpu_vm_reservation(capacity: str, reservation: str | None, queued: bool, pointer: str) -> None:
    """Raise Wrong below `pointer` unless a reservation is named exactly where the API takes a name."""
    if reservation is not None and not queued:
        message = "a node that is not queued cannot name its reservation"
        raise Wrong(f"{pointer}/reservation", message, reservation, "no name, or queued: true")
    if capacity == "reservation" and reservation is None and queued:
        raise Wrong(f"{pointer}/reservation", "a required field is missing", None, "the reservation's name")
