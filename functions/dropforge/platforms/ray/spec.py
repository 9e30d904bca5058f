"""The spec's class for Ray on GKE: `target.type` 'ray'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from dropforge.base.changes import evolve
from dropforge.base.errors import SpecProblem
from dropforge.platforms.gke.spec import ClusterTarget, GkeCluster, GkePlacement
from dropforge.platforms.images import attention_problems
from dropforge.platforms.maxtext import check_image, check_training
from dropforge.spec.demand import Demand
from dropforge.spec.job_spec import Accelerators, one_sold
from dropforge.spec.machine import Machine, gib
from dropforge.spec.parts import Wrong

from .catalog import BALANCED, GKE_TPUS, TpuSlice, slice_quota, tpu_slice

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from dropforge.base.settings import Settings
    from dropforge.spec import JobSpec


class RayTarget(ClusterTarget):
    """MaxText on one slice of TPU hosts of a GKE cluster with the Ray operator (KubeRay), by Ray Train."""

    trainer = "maxtext"
    cluster_addons = {"addonsConfig": {"rayOperatorConfig": {"enabled": True}}}

    type: Literal["ray"] = Field(description="A RayJob on GKE.")
    accelerator: str = Field(default="tpu-v6e-slice", description="GKE's name of the TPU generation.")
    topology: str = Field(
        default="4x4", description="Chips of the slice. The number of hosts and their chips follow from it."
    )
    cluster: GkeCluster = Field(default=GkeCluster(), description="The cluster of an attempt, with the Ray operator.")
    head_cpu: int = Field(
        default=16,
        ge=1,
        le=BALANCED.cpu,
        description="CPUs of the head, which converts weights and runs the driver.",
    )
    head_memory_gib: int = Field(
        default=100,
        ge=1,
        le=BALANCED.memory_gib,
        description="Memory of the head, which holds the model twice, in 32 bits.",
    )
    head_storage_gib: int = Field(
        default=200, ge=10, le=6000, description="The head's disk, for weights before and after training."
    )
    placements: list[GkePlacement] = Field(
        min_length=1, max_length=20, description="Regions and capacities, in the order in which attempts try them."
    )
    price_usd_per_hour: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Price of all hosts, for machines whose price dropforge does not know.",
    )

    @classmethod
    def sold(cls) -> Collection[str]:
        return GKE_TPUS

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
            expected = one_sold(self.accelerator, type(self))
            raise Wrong("/accelerator", "GKE does not offer this TPU", self.accelerator, expected)
        if tpu_slice(self.accelerator, self.topology) is None:
            raise Wrong("/topology", f"{self.accelerator} has no such slice", self.topology, known.expected)
        return self

    @property
    def accelerators(self) -> Accelerators:
        chips = self.slice.hosts * self.slice.chips
        return Accelerators(1, f"{self.accelerator} {self.topology}", chips * GKE_TPUS[self.accelerator].memory_gib)

    @property
    def machines(self) -> int:
        return self.slice.hosts

    @property
    def storage_gib(self) -> int:
        return self.head_storage_gib

    @property
    def machine(self) -> Machine:
        """A host of the slice. It keeps no files: checkpoints are in the bucket."""
        known = GKE_TPUS[self.accelerator]
        return Machine(
            accelerator=self.accelerator,
            accelerators=self.slice.chips,
            accelerator_bytes=gib(known.memory_gib),
            hosts=self.slice.hosts,
            host_bytes=gib(known.hosts[self.slice.chips].pod_memory_gib),
        )

    @property
    def driver_machine(self) -> Machine:
        """The head, which has no chips."""
        return Machine(
            accelerator="none",
            accelerators=0,
            accelerator_bytes=0,
            host_bytes=gib(self.head_memory_gib),
            disk_bytes=gib(self.head_storage_gib),
            host_field="head_memory_gib",
            disk_field="head_storage_gib",
        )

    def larger(self) -> Iterator[RayTarget]:
        chips = self.slice.hosts * self.slice.chips
        for topology in GKE_TPUS[self.accelerator].topologies:
            slice_ = tpu_slice(self.accelerator, topology)
            if slice_ is not None and slice_.hosts * slice_.chips > chips:
                yield evolve(self, topology=topology)

    def demands(self) -> Iterator[Demand]:
        for placement in self.placements:
            quota = slice_quota(self.accelerator, placement.region, placement.capacity)
            yield Demand(
                self.accelerator, self.slice.hosts * self.slice.chips, placement.region, quota, placement.capacity
            )

    def missing(self, job: JobSpec, settings: Settings) -> Iterator[SpecProblem]:
        yield from super().missing(job, settings)
        yield from check_image(settings, "train_ray_image", "/target/type", self.type)

    def machine_problems(self, job: JobSpec) -> Iterator[SpecProblem]:
        yield from attention_problems("train_ray", job)

    def check(self, job: JobSpec) -> None:
        check_training(job)
        super().check(job)
