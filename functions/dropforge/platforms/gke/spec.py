"""The spec's classes for GKE: `target.type` and `serve.type` 'gke'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from dropforge.base.changes import evolve
from dropforge.base.errors import SpecProblem
from dropforge.platforms.gpus import GPUS
from dropforge.platforms.images import attention_problems, gpu_problems
from dropforge.spec.demand import Demand
from dropforge.spec.job_spec import Accelerators, ServeSpec, TargetSpec, one_sold
from dropforge.spec.machine import Machine, gib
from dropforge.spec.parts import Capacity, ClusterName, Duration, Part, Placement, Region, Reservation, Wrong

from .catalog import GKE_GPUS, gke_drivers, gpu_quota

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from dropforge.base.settings import Settings
    from dropforge.spec import JobSpec


class GkePlacement(Placement):
    """A region of GKE and the kind of capacity to request there."""

    capacity: Capacity = Field(
        default="on_demand", description="on_demand, spot, flex_start (Dynamic Workload Scheduler), or a reservation."
    )
    reservation: Reservation | None = Field(default=None, description="A specific reservation, by its name.")

    @model_validator(mode="after")
    def _names_its_reservation(self) -> GkePlacement:
        if (self.capacity == "reservation") != (self.reservation is not None):
            found = {"capacity": self.capacity, "reservation": self.reservation}
            raise Wrong("", "capacity and reservation do not agree", found, "capacity 'reservation' with a name")
        return self


class GkeCluster(Part):
    """The cluster of an attempt: a standing cluster, which has the same name in every region, or a new cluster."""

    name: ClusterName | None = Field(default=None, description="Default: the deployment's own cluster.")
    create: bool = Field(
        default=False, description="Create an Autopilot cluster for the attempt and delete it afterwards."
    )

    @model_validator(mode="after")
    def _exists_or_is_made(self) -> GkeCluster:
        if self.create and self.name is not None:
            raise Wrong("/name", "a cluster that the run creates is named after the run", self.name, "no name")
        return self


CLUSTER_SECONDS = 300  # GKE creates no cluster faster; it usually takes 8 minutes


class ClusterTarget(TargetSpec):
    """A target on GKE: it has placements of GKE, and a cluster.

    `cluster_addons` are the fields that a cluster of the attempt's own gets beside those of every cluster.
    """

    cluster_addons: ClassVar[dict[str, Any]] = {}

    if TYPE_CHECKING:
        cluster: GkeCluster

        @property
        def placements(self) -> list[GkePlacement]: ...

    @property
    def start_seconds(self) -> int:
        return 120 + (CLUSTER_SECONDS if self.cluster.create else 0)

    def missing(self, job: JobSpec, settings: Settings) -> Iterator[SpecProblem]:
        cluster = self.cluster
        if not (cluster.create or cluster.name or settings.gke_cluster):
            expected = "a cluster's name, or `create`: this deployment has no cluster of its own"
            yield SpecProblem("/target/cluster/name", "no cluster is named", None, expected)
        if cluster.create and not settings.nodes_service_account:
            expected = (
                "a standing cluster's name, or a deployment with ephemeral_cluster_regions (terraform/variables.tf)"
            )
            yield SpecProblem(
                "/target/cluster/create", "this deployment does not let runs create clusters", "true", expected
            )


class GkeTarget(ClusterTarget):
    """A Kubernetes Job on GKE Autopilot: one or several nodes with the same GPUs, sharded by FSDP2."""

    type: Literal["gke"] = Field(description="A Kubernetes Job on GKE Autopilot.")
    accelerator: str = Field(default="nvidia-l4", description="The GPU, by GKE's name.")
    accelerator_count: int = Field(default=1, ge=1, le=16, description="GPUs of each node; one process per GPU.")
    nodes: int = Field(default=1, ge=1, le=64, description="Nodes with the same GPUs; all of them share the model.")
    node_network: Literal["rdma", "tcp"] = Field(
        default="rdma",
        description="The network between several nodes. dropforge sets up no RDMA yet: with 'tcp' you accept that GPUs "
        "wait for the network.",
    )
    cluster: GkeCluster = Field(default=GkeCluster(), description="The cluster of an attempt.")
    cpu: int | None = Field(
        default=None, ge=1, le=224, description="Of each node. Default: Autopilot's value for the GPU."
    )
    memory_gib: int | None = Field(
        default=None, ge=1, le=4000, description="Of each node. Default: Autopilot's value for the GPU."
    )
    shared_memory_gib: int = Field(default=16, ge=1, le=1000, description="/dev/shm, which counts as memory.")
    ephemeral_storage_gib: int = Field(
        default=100, ge=10, le=6000, description="Space for weights, data and checkpoints."
    )
    placements: list[GkePlacement] = Field(
        min_length=1, max_length=20, description="Regions and capacities, in the order in which attempts try them."
    )
    price_usd_per_hour: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Price of all nodes, for machines whose price dropforge does not know.",
    )

    @model_validator(mode="after")
    def _gke_offers_it(self) -> GkeTarget:
        check_gke_pod(self)
        return self

    @classmethod
    def sold(cls) -> Collection[str]:
        return GKE_GPUS

    @property
    def accelerators(self) -> Accelerators:
        count = self.accelerator_count * self.nodes
        return Accelerators(count, self.accelerator, count * GPUS[self.accelerator].memory_gib)

    @property
    def machines(self) -> int:
        return self.nodes

    @property
    def storage_gib(self) -> int:
        return self.ephemeral_storage_gib * self.nodes

    @property
    def machine(self) -> Machine:
        return _machine(self, self.nodes)

    def larger(self) -> Iterator[GkeTarget]:
        for changes in _larger_nodes(self.accelerator, self.accelerator_count):
            yield evolve(self, **changes)

    def demands(self) -> Iterator[Demand]:
        for placement in self.placements:
            number = self.accelerator_count * self.nodes
            yield _demand(self.accelerator, number, placement.region, placement.capacity)

    def missing(self, job: JobSpec, settings: Settings) -> Iterator[SpecProblem]:
        yield from super().missing(job, settings)
        yield from _label_problems(job)

    def machine_problems(self, job: JobSpec) -> Iterator[SpecProblem]:
        yield from gpu_problems("train_trl", self.accelerator, gke_drivers(), "/target/accelerator")
        yield from attention_problems("train_trl", job)
        if self.nodes > 1 and self.node_network == "rdma":
            message = f"dropforge sets up no RDMA network, so {self.accelerator} of several nodes would wait for TCP"
            expected = "1, with all GPUs on one node; or node_network 'tcp', which accepts that"
            yield SpecProblem("/target/nodes", message, str(self.nodes), expected)

    def check(self, job: JobSpec) -> None:
        processes = self.nodes * self.accelerator_count
        if processes > 1 and (found := job.training.unsharded()):
            field, value, reason, cure = found
            message, expected = f"{reason} over {processes} processes", f"{cure}, or one GPU on one node"
            raise Wrong(f"/training/{field}", message, value, expected)
        super().check(job)


class GkeServe(ServeSpec):
    """A vLLM endpoint as a Deployment on a standing GKE Autopilot cluster. Only clients in the VPC reach it."""

    takes_names = True
    splits_requests = True
    shares = True

    type: Literal["gke"] = Field(description="A Deployment on GKE Autopilot.")
    accelerator: str = Field(default="nvidia-l4", description="The GPU, by GKE's name.")
    accelerator_count: int = Field(default=1, ge=1, le=16, description="GPUs of each instance (tensor parallelism).")
    region: Region | None = Field(default=None, description="Default: the target's first placement.")
    cluster: ClusterName | None = Field(
        default=None, description="Default: the target's cluster, else the deployment's cluster."
    )
    capacity: Capacity = Field(default="on_demand", description="on_demand, spot, flex_start, or a reservation.")
    reservation: Reservation | None = Field(default=None, description="A specific reservation, by its name.")
    cpu: int | None = Field(default=None, ge=1, le=224, description="Default: Autopilot's value for the accelerator.")
    memory_gib: int | None = Field(
        default=None, ge=1, le=4000, description="Default: Autopilot's value for the accelerator."
    )
    ephemeral_storage_gib: int = Field(
        default=20,
        ge=10,
        le=6000,
        description="Disk of an instance. The server streams the weights, so they need no disk.",
    )
    max_model_len: int = Field(default=2048, ge=16, le=1_048_576, description="Tokens of prompt plus answer.")
    max_num_seqs: int = Field(default=32, ge=1, le=1000, description="Requests served at once by one instance.")
    min_instances: int = Field(default=1, ge=1, le=100, description="Instances that always run.")
    max_instances: int = Field(
        default=1,
        ge=1,
        le=100,
        description="The largest number of instances. If it is above min_instances, the queue decides the number.",
    )
    target_queue_length: int = Field(default=4, ge=1, le=1000, description="Waiting requests per instance, on average.")
    startup_timeout: Duration = Field(default="30m", description="From the request to an answer.")
    ttl: Duration = Field(default="24h", description="How long the endpoint lives after it is ready.")
    price_usd_per_hour: float | None = Field(
        default=None, gt=0, le=1_000_000, description="Price of an instance, if dropforge does not know it."
    )

    @model_validator(mode="after")
    def _gke_offers_it(self) -> GkeServe:
        check_gke_pod(self)
        if self.min_instances > self.max_instances:
            expected = f"at most max_instances, {self.max_instances}"
            raise Wrong("/min_instances", "min_instances is above max_instances", self.min_instances, expected)
        if (self.capacity == "reservation") != (self.reservation is not None):
            found = {"capacity": self.capacity, "reservation": self.reservation}
            raise Wrong("", "capacity and reservation do not agree", found, "capacity 'reservation' with a name")
        return self

    @property
    def storage_gib(self) -> int:
        return self.ephemeral_storage_gib * self.max_instances

    @classmethod
    def sold(cls) -> Collection[str]:
        return GKE_GPUS

    def machine(self, job: JobSpec) -> Machine:
        return _machine(self)

    def larger(self) -> Iterator[GkeServe]:
        for changes in _larger_nodes(self.accelerator, self.accelerator_count):
            yield evolve(self, **changes)

    def demands(self, job: JobSpec) -> Iterator[Demand]:
        region = self.region or job.target.placements[0].region
        yield _demand(self.accelerator, self.accelerator_count * self.max_instances, region, self.capacity)

    def machine_problems(self, job: JobSpec) -> Iterator[SpecProblem]:
        yield from gpu_problems("serve_vllm", self.accelerator, gke_drivers(), "/serve/accelerator")

    def missing(self, job: JobSpec, settings: Settings) -> Iterator[SpecProblem]:
        trains_on = job.target.cluster.name if isinstance(job.target, ClusterTarget) else None
        if not (self.cluster or trains_on or settings.gke_cluster):
            expected = "a standing cluster's name: this deployment has no cluster of its own"
            yield SpecProblem("/serve/cluster", "no cluster is named", None, expected)
        if self.canary is not None and (problem := self.why_whole(job, settings)):
            expected = "no canary: the model gets every request at once; or a Gateway in that region"
            yield SpecProblem("/serve/canary", problem, f"{self.canary.percent} percent", expected)
        if not isinstance(job.target, GkeTarget):  # GkeTarget.missing reports the labels
            yield from _label_problems(job)

    def why_whole(self, job: JobSpec, settings: Settings) -> str:
        region = self.region or job.target.placements[0].region
        if settings.has_gateway(region):
            return ""
        return (
            "serve.type gke can give a model a share of the requests only by a Gateway, and this deployment has none "
            f"in {region} (Terraform: endpoint_gateway)"
        )


def _label_problems(job: JobSpec) -> Iterator[SpecProblem]:
    """Google Cloud's labels may begin and end with - and _; labels of Kubernetes may not."""
    for key, value in job.labels.items():
        if key != key.strip("-_") or value != value.strip("-_"):
            message, expected = "not a label of Kubernetes", "no - or _ at either end"
            yield SpecProblem(f"/labels/{key}", message, f"{key}={value}", expected)


def _machine(part: GkeTarget | GkeServe, nodes: int = 1) -> Machine:
    """A node. Without memory_gib, its memory is Autopilot's choice, which is not known."""
    return Machine(
        accelerator=part.accelerator,
        accelerators=part.accelerator_count,
        accelerator_bytes=gib(GPUS[part.accelerator].reported_gib),
        hosts=nodes,
        host_bytes=None if part.memory_gib is None else gib(part.memory_gib),
        disk_bytes=gib(part.ephemeral_storage_gib),
        host_field="memory_gib",
        disk_field="ephemeral_storage_gib",
    )


def _larger_nodes(accelerator: str, count: int) -> Iterator[dict[str, str | int]]:
    """The fields of nodes with more memory of their GPUs: more GPUs of the same kind, then other GPUs with bf16."""
    able = {name: known for name, known in GKE_GPUS.items() if GPUS[name].capability >= (8, 0)}
    nodes = [(name, number) for name, known in able.items() for number in known.counts]
    by_size = sorted(nodes, key=lambda node: (node[0] != accelerator, node[1] * GPUS[node[0]].memory_gib))
    for name, number in by_size:
        if number * GPUS[name].memory_gib > count * GPUS[accelerator].memory_gib:
            yield {"accelerator": name, "accelerator_count": number}


def _demand(accelerator: str, number: int, region: str, capacity: str) -> Demand:
    quota = gpu_quota(accelerator, region, capacity)
    return Demand(accelerator, number, region, quota, capacity, listed_by="compute")


def check_gke_pod(part: GkeTarget | GkeServe) -> None:
    """Raise Wrong unless Autopilot offers nodes with the part's GPUs, and takes a pod with its CPU and memory there."""
    accelerator, count = part.accelerator, part.accelerator_count
    known = GKE_GPUS.get(accelerator)
    if known is None:
        expected = one_sold(accelerator, type(part))
        raise Wrong("/accelerator", "GKE Autopilot does not offer this accelerator", accelerator, expected)
    if count not in known.counts:
        expected = f"one of {', '.join(map(str, known.counts))}"
        raise Wrong("/accelerator_count", f"GKE Autopilot has no node with so many {accelerator}", count, expected)
    most = known.most[count]
    for field, found, largest in (("cpu", part.cpu, most.cpu), ("memory_gib", part.memory_gib, most.memory_gib)):
        if found is not None and found > largest:
            message = f"GKE Autopilot refuses so large a pod beside {count} {accelerator}"
            raise Wrong(f"/{field}", message, found, f"at most {largest}, or no value: then Autopilot chooses")
