"""Where a run's model is served: one class per kind of endpoint, with everything that only this kind has."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .parts import Duration, Part, Region, Wrong, Zone, seconds
from .targets import (
    Capacity,
    ClusterName,
    Reservation,
    check_cloud_run_machine,
    check_cloud_run_region,
    check_gke_accelerator,
    check_tpu_vm,
    check_tpu_vm_reservation,
    check_tpu_vm_zone,
)


class CloudRunServe(Part):
    """A vLLM endpoint on a Cloud Run service with one GPU, scaling to zero."""

    type: Literal["cloud_run"]
    accelerator: str = "nvidia-l4"
    cpu: int = Field(default=8, ge=1, le=64)
    memory_gib: int = Field(default=32, ge=1, le=512)
    region: Region | None = Field(default=None, description="Default: the first placement of the target.")
    max_model_len: int = Field(default=2048, ge=16, le=1_048_576, description="Tokens of prompt plus answer.")
    max_num_seqs: int = Field(default=32, ge=1, le=1000, description="Requests served at once by one instance.")
    min_instances: int = Field(default=0, ge=0, le=100)
    max_instances: int = Field(default=1, ge=1, le=100)
    startup_timeout: Duration = "20m"
    ttl: Duration = Field(default="24h", description="How long the endpoint lives after it is ready.")
    price_usd_per_hour: float | None = Field(default=None, gt=0, description="Of an instance, where ours is unknown.")

    @model_validator(mode="after")
    def _cloud_run_offers_it(self) -> CloudRunServe:
        check_cloud_run_machine(self.accelerator, self.cpu, self.memory_gib)
        if self.region is not None:
            check_cloud_run_region(self.accelerator, self.region, "/region")
        if self.min_instances > self.max_instances:
            expected = f"at most max_instances, {self.max_instances}"
            raise Wrong("/min_instances", "min_instances is above max_instances", self.min_instances, expected)
        return self


class GkeServe(Part):
    """A vLLM endpoint as a Deployment on a standing GKE Autopilot cluster, reached inside the VPC only."""

    type: Literal["gke"]
    accelerator: str = "nvidia-l4"
    accelerator_count: int = Field(default=1, ge=1, le=16, description="GPUs of each instance (tensor parallelism).")
    region: Region | None = Field(default=None, description="Default: the first placement of the target.")
    cluster: ClusterName | None = Field(default=None, description="Default: the target's, or the deployment's own.")
    capacity: Capacity = "on_demand"
    reservation: Reservation | None = Field(default=None, description="A specific reservation, by its name.")
    cpu: int | None = Field(default=None, ge=1, le=224, description="Default: Autopilot's for the accelerator.")
    memory_gib: int | None = Field(default=None, ge=1, le=4000, description="Default: likewise.")
    ephemeral_storage_gib: int = Field(default=20, ge=10, le=6000)
    max_model_len: int = Field(default=2048, ge=16, le=1_048_576, description="Tokens of prompt plus answer.")
    max_num_seqs: int = Field(default=32, ge=1, le=1000, description="Requests served at once by one instance.")
    min_instances: int = Field(default=1, ge=1, le=100)
    max_instances: int = Field(default=1, ge=1, le=100, description="More than min_instances: scaled by the queue.")
    target_queue_length: int = Field(default=4, ge=1, le=1000, description="Waiting requests per instance, on average.")
    startup_timeout: Duration = "30m"
    ttl: Duration = Field(default="24h", description="How long the endpoint lives after it is ready.")
    price_usd_per_hour: float | None = Field(default=None, gt=0, description="Of an instance, where ours is unknown.")

    @model_validator(mode="after")
    def _gke_offers_it(self) -> GkeServe:
        check_gke_accelerator(self.accelerator, self.accelerator_count)
        if self.min_instances > self.max_instances:
            expected = f"at most max_instances, {self.max_instances}"
            raise Wrong("/min_instances", "min_instances is above max_instances", self.min_instances, expected)
        if (self.capacity == "reservation") != (self.reservation is not None):
            found = {"capacity": self.capacity, "reservation": self.reservation}
            raise Wrong("", "capacity and reservation do not agree", found, "capacity 'reservation' with a name")
        return self


class OneMachine(Part):
    """An endpoint on one machine: nothing scales it."""

    @property
    def min_instances(self) -> int:
        """Always there."""
        return 1

    @property
    def max_instances(self) -> int:
        """Never more."""
        return 1


class TrainingVmServe(OneMachine):
    """A vLLM endpoint on the TPU VM that trained, which is kept: no second machine, and no second wait for capacity."""

    type: Literal["training_vm"]
    max_model_len: int = Field(default=2048, ge=16, le=1_048_576, description="Tokens of prompt plus answer.")
    max_num_seqs: int = Field(default=32, ge=1, le=1000, description="Requests served at once.")
    startup_timeout: Duration = Field(default="30m", description="From the end of the training to an answer.")
    ttl: Duration = Field(default="24h", description="How long the endpoint lives after it is ready.")


class TpuVmServe(OneMachine):
    """A vLLM endpoint on a Cloud TPU VM of its own, one machine, reached inside the VPC only."""

    type: Literal["tpu_vm"]
    accelerator_type: str = Field(default="v5litepod-8", description="The model is on all of its chips.")
    runtime_version: str | None = Field(default=None, description="Default: by the accelerator type.")
    zone: Zone | None = Field(default=None, description="Default: the first placement of a target of this type.")
    queued: bool = Field(default=True, description="Wait for capacity in Google's queue; false: take it now or fail.")
    capacity: Literal["on_demand", "spot", "reservation"] = "on_demand"
    reservation: Reservation | None = Field(default=None, description="A specific reservation, by its name.")
    max_model_len: int = Field(default=2048, ge=16, le=1_048_576, description="Tokens of prompt plus answer.")
    max_num_seqs: int = Field(default=32, ge=1, le=1000, description="Requests served at once.")
    startup_timeout: Duration = Field(default="45m", description="From the request to an answer, the queue included.")
    ttl: Duration = Field(default="24h", description="How long the endpoint lives after it is ready.")
    price_usd_per_hour: float | None = Field(default=None, gt=0, description="Of the machine, where ours is unknown.")

    @model_validator(mode="after")
    def _cloud_tpu_offers_it(self) -> TpuVmServe:
        check_tpu_vm(self.accelerator_type, self.runtime_version)
        if self.zone is not None:
            check_tpu_vm_zone(self.accelerator_type, self.zone, "/zone")
        if self.reservation is not None and self.capacity != "reservation":
            found = {"capacity": self.capacity, "reservation": self.reservation}
            raise Wrong("", "capacity and reservation do not agree", found, "capacity 'reservation' with a name")
        check_tpu_vm_reservation(self.capacity, self.reservation, self.queued, "")
        return self


def serving_seconds(serve: CloudRunServe | GkeServe | TpuVmServe | TrainingVmServe) -> int:
    """How long an endpoint may exist: to start, and then for its ttl."""
    return seconds(serve.startup_timeout) + seconds(serve.ttl)
