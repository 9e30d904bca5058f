"""The spec's classes for Cloud Run: `target.type` and `serve.type` 'cloud_run'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from dropforge.base.changes import evolve
from dropforge.base.errors import SpecProblem
from dropforge.platforms.gpus import GPUS
from dropforge.platforms.images import attention_problems, gpu_problems
from dropforge.spec.demand import Demand, Quota
from dropforge.spec.guess import one_of
from dropforge.spec.job_spec import Accelerators, ServeSpec, TargetSpec, one_sold
from dropforge.spec.machine import Machine, gib
from dropforge.spec.parts import Duration, Placement, Region, Wrong, seconds

from .catalog import (
    CLOUD_RUN_DRIVERS,
    CLOUD_RUN_MACHINES,
    CLOUD_RUN_QUOTAS,
    CPU_QUOTA,
    GPU_STARTUP_SECONDS,
    GPU_TASK_SECONDS,
    MEMORY_QUOTA,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Set

    from dropforge.base.settings import Settings
    from dropforge.spec import JobSpec


class CloudRunTarget(TargetSpec):
    """A Cloud Run job with one GPU (https://cloud.google.com/run/docs/configuring/jobs/gpu)."""

    type: Literal["cloud_run"] = Field(description="A Cloud Run job.")
    accelerator: str = Field(default="nvidia-l4", description="The GPU, by Cloud Run's name.")
    cpu: int = Field(default=8, ge=1, le=64, description="CPUs of the task.")
    memory_gib: int = Field(default=32, ge=1, le=512, description="Memory of the task.")
    zonal_redundancy: bool = Field(
        default=False,
        description="Ask for a GPU with zonal redundancy. It costs more, and has another quota.",
    )
    disk_gib: int | None = Field(
        default=None,
        ge=10,
        le=1000,
        description="An ephemeral disk for weights, data and checkpoints (Preview). Default: files take memory.",
    )
    placements: list[Placement] = Field(
        min_length=1, max_length=20, description="Regions, in the order in which attempts try them."
    )
    price_usd_per_hour: float | None = Field(
        default=None, gt=0, le=1_000_000, description="Price of the machine, if dropforge does not know it."
    )

    @model_validator(mode="after")
    def _cloud_run_offers_it(self) -> CloudRunTarget:
        check_cloud_run_machine(type(self), self.accelerator, self.cpu, self.memory_gib)
        for index, placement in enumerate(self.placements):
            check_cloud_run_region(self.accelerator, placement.region, f"/placements/{index}/region")
        return self

    @classmethod
    def sold(cls) -> Collection[str]:
        return CLOUD_RUN_MACHINES

    @property
    def accelerators(self) -> Accelerators:
        return Accelerators(1, self.accelerator, GPUS[self.accelerator].memory_gib)

    @property
    def storage_gib(self) -> int:
        return self.disk_gib or 0

    @property
    def machine(self) -> Machine:
        return _machine(self.accelerator, self.memory_gib, self.disk_gib, "disk_gib")

    def larger(self) -> Iterator[CloudRunTarget]:
        regions = {placement.region for placement in self.placements}
        for changes in _larger_machines(self.accelerator, self.cpu, self.memory_gib, regions):
            yield evolve(self, **changes)

    @property
    def offered_places(self) -> tuple[str, ...]:
        return CLOUD_RUN_MACHINES[self.accelerator].regions

    def demands(self) -> Iterator[Demand]:
        for placement in self.placements:
            yield _demand(self, 1, placement.region, self.zonal_redundancy)

    def check(self, job: JobSpec) -> None:
        if seconds(job.limits.max_duration) > GPU_TASK_SECONDS.most:
            message = "longer than a Cloud Run task with a GPU may run"
            raise Wrong("/limits/max_duration", message, job.limits.max_duration, "at most 12h")
        super().check(job)

    def machine_problems(self, job: JobSpec) -> Iterator[SpecProblem]:
        yield from gpu_problems("train_trl", self.accelerator, CLOUD_RUN_DRIVERS, "/target/accelerator")
        yield from attention_problems("train_trl", job)


class CloudRunServe(ServeSpec):
    """A vLLM endpoint on a Cloud Run service with one GPU. It scales to zero."""

    is_private = False
    credential = "identity_token"
    takes_names = True
    splits_requests = True
    shares = True

    type: Literal["cloud_run"] = Field(description="A Cloud Run service.")
    accelerator: str = Field(default="nvidia-l4", description="The GPU, by Cloud Run's name.")
    cpu: int = Field(default=8, ge=1, le=64, description="CPUs of an instance.")
    memory_gib: int = Field(default=32, ge=1, le=512, description="Memory of an instance.")
    region: Region | None = Field(default=None, description="Default: the target's first placement.")
    max_model_len: int = Field(default=2048, ge=16, le=1_048_576, description="Tokens of prompt plus answer.")
    max_num_seqs: int = Field(default=32, ge=1, le=1000, description="Requests served at once by one instance.")
    min_instances: int = Field(
        default=0, ge=0, le=100, description="Instances that run without requests; 0: the service scales to zero."
    )
    max_instances: int = Field(
        default=1, ge=1, le=100, description="The largest number of instances; the budget counts all of them."
    )
    startup_timeout: Duration = Field(
        default="20m", description="From the request to an answer. At most 30m, Cloud Run's limit with a GPU."
    )
    ttl: Duration = Field(default="24h", description="How long the endpoint lives after it is ready.")
    price_usd_per_hour: float | None = Field(
        default=None, gt=0, le=1_000_000, description="Price of an instance, if dropforge does not know it."
    )

    @model_validator(mode="after")
    def _cloud_run_offers_it(self) -> CloudRunServe:
        check_cloud_run_machine(type(self), self.accelerator, self.cpu, self.memory_gib)
        if self.region is not None:
            check_cloud_run_region(self.accelerator, self.region, "/region")
        if self.min_instances > self.max_instances:
            expected = f"at most max_instances, {self.max_instances}"
            raise Wrong("/min_instances", "min_instances is above max_instances", self.min_instances, expected)
        if seconds(self.startup_timeout) > GPU_STARTUP_SECONDS.most:
            message = "longer than Cloud Run's startup probe may take beside a GPU"
            expected = "at most 30m; a model that needs longer to load can be served on GKE (serve.type 'gke')"
            raise Wrong("/startup_timeout", message, self.startup_timeout, expected)
        return self

    @classmethod
    def sold(cls) -> Collection[str]:
        return CLOUD_RUN_MACHINES

    def machine(self, job: JobSpec) -> Machine:
        return _machine(self.accelerator, self.memory_gib)

    def larger(self) -> Iterator[CloudRunServe]:
        for changes in _larger_machines(self.accelerator, self.cpu, self.memory_gib, {self.region} - {None}):
            yield evolve(self, **changes)

    def machine_problems(self, job: JobSpec) -> Iterator[SpecProblem]:
        yield from gpu_problems("serve_vllm", self.accelerator, CLOUD_RUN_DRIVERS, "/serve/accelerator")

    def check(self, job: JobSpec) -> None:
        super().check(job)
        if self.region is None:
            check_cloud_run_region(self.accelerator, job.target.placements[0].region, "/serve/region")

    def demands(self, job: JobSpec) -> Iterator[Demand]:
        # During a rollout the instances of two revisions count: https://github.com/pulumi/pulumi-gcp/issues/3794
        revisions = 2 if self.is_named else 1
        region = self.region or job.target.placements[0].region
        yield _demand(self, self.max_instances * revisions, region)

    def missing(self, job: JobSpec, settings: Settings) -> Iterator[SpecProblem]:
        if self.is_named and not settings.rollout_workflow:
            message, expected = (
                "this deployment has no workflow for rollouts",
                "no name, or `make deploy` of this version",
            )
            pointer = "/serve/endpoint" if self.endpoint else "/serve/share"
            yield SpecProblem(pointer, message, self.endpoint or "true", expected)


def _machine(accelerator: str, memory_gib: int, disk_gib: int | None = None, disk_field: str = "") -> Machine:
    """An instance with one GPU. Without a disk, its files are in its memory."""
    return Machine(
        accelerator=accelerator,
        accelerators=1,
        accelerator_bytes=gib(GPUS[accelerator].reported_gib),
        host_bytes=gib(memory_gib),
        disk_bytes=None if disk_gib is None else gib(disk_gib),
        files_in_memory=disk_gib is None,
        host_field="memory_gib",
        disk_field=disk_field,
    )


def _larger_machines(
    accelerator: str, cpu: int, memory_gib: int, regions: Set[str | None]
) -> Iterator[dict[str, str | int]]:
    """The fields of instances that have a larger GPU and are in all `regions`, with the least CPU and memory."""
    memory = GPUS[accelerator].memory_gib
    for name in sorted(CLOUD_RUN_MACHINES, key=lambda name: GPUS[name].memory_gib):
        known = CLOUD_RUN_MACHINES[name]
        if GPUS[name].memory_gib > memory and regions <= set(known.regions):
            yield {
                "accelerator": name,
                "cpu": max(cpu, known.min_cpu),
                "memory_gib": max(memory_gib, known.min_memory_gib),
            }


def _demand(part: CloudRunTarget | CloudRunServe, number: int, region: str, zonal_redundancy: bool = False) -> Demand:
    """The demand of `number` instances."""
    beside = (
        Demand("vCPU", part.cpu * number, region, _quota(CPU_QUOTA.id, region, CPU_QUOTA.units)),
        Demand("GiB of memory", part.memory_gib * number, region, _quota(MEMORY_QUOTA.id, region, MEMORY_QUOTA.units)),
    )
    if part.accelerator not in CLOUD_RUN_QUOTAS:
        return Demand(part.accelerator, number, region, beside=beside)
    counted = CLOUD_RUN_QUOTAS[part.accelerator]
    redundancy = "" if zonal_redundancy else "NoZonalRedundancy"
    quota = _quota(f"{counted.word}GpuAlloc{redundancy}PerProjectRegion", region, counted.units)
    return Demand(part.accelerator, number, region, quota, beside=beside)


def _quota(name: str, region: str, units: int) -> Quota:
    return Quota("run.googleapis.com", name, {"region": region}, units)


def check_cloud_run_machine(
    cls: type[CloudRunTarget | CloudRunServe], accelerator: str, cpu: int, memory_gib: int
) -> None:
    """Raise Wrong unless Cloud Run offers `accelerator` with that much CPU and memory."""
    known = CLOUD_RUN_MACHINES.get(accelerator)
    if known is None:
        expected = one_sold(accelerator, cls)
        raise Wrong("/accelerator", "Cloud Run does not offer this accelerator", accelerator, expected)
    if cpu < known.min_cpu:
        raise Wrong("/cpu", f"too little for {accelerator}", cpu, f"at least {known.min_cpu}")
    if memory_gib < known.min_memory_gib:
        raise Wrong("/memory_gib", f"too little for {accelerator}", memory_gib, f"at least {known.min_memory_gib}")
    sizes = known.most_memory_gib
    if sizes and cpu not in sizes:
        expected = f"one of {', '.join(map(str, sizes))}"
        raise Wrong("/cpu", f"Cloud Run has no instance with so many CPUs and {accelerator}", cpu, expected)
    if sizes and memory_gib > sizes[cpu]:
        expected = "at most " + ", ".join(f"{most} with {cpus} CPUs" for cpus, most in sizes.items())
        raise Wrong("/memory_gib", f"too much for an instance with {cpu} CPUs", memory_gib, expected)


def check_cloud_run_region(accelerator: str, region: str, pointer: str) -> None:
    """Raise Wrong, at `pointer`, unless Cloud Run has `accelerator` in `region`."""
    regions = CLOUD_RUN_MACHINES[accelerator].regions
    if region not in regions:
        raise Wrong(pointer, f"Cloud Run does not offer {accelerator} there", region, one_of(region, regions))
