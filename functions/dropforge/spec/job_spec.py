"""The job spec, version 1: the contract with users, and the source of schemas/job_spec.schema.json.

Two of its parts are open, `target` and `serve`: each platform has its own classes, whose base classes are here. The
fields of JobSpec have the types `AnyTarget` and `AnyServe`. These become unions of the registered classes when the
first spec is read, so this package never imports a platform. The other parts are in sections.py.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Union, get_args

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from dropforge.base import names

from . import methods, registry
from .guess import named, one_of
from .machine import Machine
from .methods import Trainer
from .parts import (
    NAMED_KEYS,
    Budget,
    Canary,
    EndpointName,
    EnvName,
    LabelKey,
    LabelValue,
    Name,
    Part,
    SecretName,
    Wrong,
    seconds,
)
from .sections import AnyDataset, Dataset, Evaluation, Limits, Model, Notify, SyntheticDataset, Training

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from dropforge.base.errors import SpecProblem
    from dropforge.base.settings import Settings

    from .demand import Demand
    from .parts import PlacementSpec


SCHEMA_ID = "https://dropforge.dev/schemas/job_spec.schema.json"
# A secret's value must not replace what the platform, the startup script of a TPU VM, the loader or the shell reads.
# Cloud Run reserves some of them too (https://cloud.google.com/run/docs/container-contract).
RESERVED_VARIABLES = re.compile(
    "(DROPFORGE|GOOGLE|GCE|GCLOUD|CLOUDSDK|CLOUD_RUN|KUBERNETES|K|LD|BASH|DOCKER|RAY|TPU|JAX|XLA|CUDA|NVIDIA)_.*"
    "|PYTHON.*|.*_EMULATOR_HOST|PATH|HOME|USER|SHELL|SHELLOPTS|ENV|IFS|PORT|HOSTNAME|TMPDIR"
    "|STORAGE|SECRETS|PUBSUB|METADATA|ROOT|REPORTED|(STOP|KILL|OFF|LOOK)_SECONDS|LOG_BYTES|TOLD_ENDS"
)
# https://cloud.google.com/resource-manager/docs/labels-overview: Cloud Run, GKE and others refuse users' own
_GOOGLE_LABELS = "goog-"
MOST_ADAPTERS = 20  # of a shared endpoint
MOST_RANK = 64  # of such an adapter: one of an 8B model takes 0.3 GiB, and vLLM keeps 8 in accelerator memory
NO_ADAPTER = ("lm_head", "embed_tokens")


@dataclass(frozen=True)
class Accelerators:
    """The accelerators of an attempt: the number of accelerators (or slices), their name, and their total memory."""

    count: int
    name: str
    memory_gib: float


class _Typed(Part):
    """A part of a spec whose `type` selects the class. Each subclass has a single value of `type`.

    `needed` are the members that each platform declares, as a field or as a property. They have no abstract property
    here: pydantic takes no field by the name of a property of a base class.
    """

    needed: ClassVar[tuple[str, ...]] = ("type",)

    if TYPE_CHECKING:
        type: str

    @classmethod
    @cache
    def type_name(cls) -> str:
        """The value of `type` that stands for this class."""
        (name,) = get_args(cls.model_fields["type"].annotation)
        return str(name)

    @classmethod
    def missing_members(cls) -> list[str]:
        """The members that a platform must declare, and that this class lacks."""
        members = [name for name in cls.needed if name not in cls.model_fields and not hasattr(cls, name)]
        return sorted({*members, *cls.__abstractmethods__})

    @classmethod
    def sold(cls) -> Collection[str]:
        """The names of the accelerators that Google sells for this type."""
        return ()


class TargetSpec(_Typed):
    """Where a run trains. Subclasses have their own `type` and the fields of their target.

    `placement_key` is the field of a placement that
    says where: "region" or "zone". `trainer` is the software of the target's training container.
    """

    trainer: ClassVar[Trainer] = "trl"
    placement_key: ClassVar[str] = "region"
    needed: ClassVar[tuple[str, ...]] = ("type", "placements")

    if TYPE_CHECKING:

        @property
        def placements(self) -> Sequence[PlacementSpec]: ...

    @property
    @abstractmethod
    def accelerators(self) -> Accelerators:
        """The accelerators of an attempt."""

    @property
    @abstractmethod
    def machine(self) -> Machine:
        """The machine on which an attempt trains."""

    @property
    def driver_machine(self) -> Machine:
        """The machine that reads, converts and uploads; the training machine where the target has no other."""
        return self.machine

    def larger(self) -> Iterator[Self]:
        """The same target with larger machines, the smallest of these first."""
        return iter(())

    @property
    def offered_places(self) -> tuple[str, ...]:
        """The regions or zones where Google offers the accelerator; empty when the catalog does not list them."""
        return ()

    @property
    def start_seconds(self) -> int:
        """How long an attempt takes at the least until its container trains: machines, image, model."""
        return 60

    @property
    def machines(self) -> int:
        """The machines with accelerators of an attempt."""
        return 1

    @property
    def storage_gib(self) -> int:
        """The size of the disks of an attempt."""
        return 0

    def check(self, job: JobSpec) -> None:
        """Raise Wrong unless the rest of the spec fits this target."""
        method = job.training.method
        trainers = methods.method_of(method).trainers
        if self.trainer not in trainers:
            able = [cls.type_name() for cls in registry.classes("target") if cls.trainer in trainers]
            message = f"target {self.type} does not take this method"
            expected = f"{methods.in_words(methods.trained_by(self.trainer))}, or target {' or '.join(able)}"
            raise Wrong("/training/method", message, method, expected)

    def demands(self) -> Iterator[Demand]:
        """The accelerators that an attempt may request, at each placement."""
        return iter(())

    def missing(self, job: JobSpec, settings: Settings) -> Iterator[SpecProblem]:
        """The images, clusters and rights that this deployment lacks for the target."""
        return iter(())

    def machine_problems(self, job: JobSpec) -> Iterator[SpecProblem]:
        """Why an attempt could not work on its machines: the image, the driver, the network between nodes."""
        return iter(())


class ServeSpec(_Typed):
    """Where a run's model is served. Subclasses have their own `type` and the fields of their endpoint.

    `is_private`: clients reach the endpoint only from inside the VPC. `keeps_machine`: the training machine is kept and
    serves. `credential`: what a request must bring: a Google identity token where IAM guards the endpoint, the
    deployment's API key (`Settings.endpoint_key_secret`), or nothing. `streams_weights`: the server reads the weights
    from the bucket into its accelerators, without a disk. `takes_names`: `endpoint` may name an endpoint that outlives
    the run. `splits_requests`: a `canary` may have a share of the requests. `shares`: one endpoint may serve the
    adapters of many runs.
    """

    is_private: ClassVar[bool] = True
    credential: ClassVar[Literal["identity_token", "api_key", "none"]] = "api_key"
    streams_weights: ClassVar[bool] = True
    keeps_machine: ClassVar[bool] = False
    takes_names: ClassVar[bool] = False
    splits_requests: ClassVar[bool] = False
    shares: ClassVar[bool] = False
    needed: ClassVar[tuple[str, ...]] = (
        "type",
        "max_model_len",
        "max_num_seqs",
        "startup_timeout",
        "ttl",
        "min_instances",
        "max_instances",
    )

    endpoint: EndpointName | None = Field(
        default=None,
        description="The name of an endpoint that outlives the run. The model of the run replaces the model behind the "
        "endpoint's URL. Only serve.type cloud_run, gke and tpu_vm take a name. Default: the run has its own endpoint.",
    )
    canary: Canary | None = Field(
        default=None,
        description="The model first gets a share of the requests of `endpoint`. If it answers this share well, it "
        "gets "
        "all requests. Only serve.type cloud_run can give shares, and gke with a Gateway. Default: the model gets "
        "every request at once.",
    )
    share: bool = Field(
        default=False,
        description="Serve the run's adapter beside those of other runs, on one endpoint of their base model. The "
        "spec's `name` is the model in requests. Only serve.type cloud_run and gke. Default: a machine of its own.",
    )
    budget: Budget | None = Field(
        default=None,
        description="What `endpoint` may cost in each day or month. People are warned at 80 %. At 100 %, the endpoint "
        "is suspended until the next period. Default: the budget that the endpoint has, or none.",
    )
    sampling: Literal["greedy", "base_model"] = Field(
        default="greedy",
        description="What a request without sampling parameters gets: the greedy answer, as in the evaluation, or the "
        "defaults of the base model's generation_config.json (temperature, top_p, top_k).",
    )

    if TYPE_CHECKING:
        max_model_len: int
        max_num_seqs: int
        startup_timeout: str
        ttl: str

        @property
        def min_instances(self) -> int: ...
        @property
        def max_instances(self) -> int: ...

    @abstractmethod
    def machine(self, job: JobSpec) -> Machine:
        """The machine of an instance."""

    @model_validator(mode="after")
    def _may_have_the_name(self) -> Self:
        self._check_share()
        if self.endpoint is None:
            if self.canary is not None:
                message, expected = "a canary needs an endpoint that outlives the run", "serve.endpoint, or no canary"
                raise Wrong("/canary", message, "serve.endpoint is missing", expected)
            if self.budget is not None:
                message = "a budget by day or month needs an endpoint that outlives the run"
                expected = "serve.endpoint; limits.max_cost_usd limits a run and its own endpoint"
                raise Wrong("/budget", message, "serve.endpoint is missing", expected)
            return self
        if not self.takes_names:
            able = [cls.type_name() for cls in registry.classes("serve") if cls.takes_names]
            raise Wrong("/endpoint", self.no_name(), self.endpoint, f"serve.type {' or '.join(able)}, or no name")
        if not names.is_endpoint_name(self.endpoint):
            reserved = ", ".join(sorted(names.RESERVED_ENDPOINTS))
            raise Wrong("/endpoint", "the name is reserved", self.endpoint, f"neither {reserved} nor a run id")
        if self.canary is not None and not self.splits_requests:
            found, expected = f"{self.canary.percent} percent", "no canary: the model gets every request at once"
            raise Wrong("/canary", self.no_canary(), found, expected)
        return self

    def _check_share(self) -> None:
        if not self.share:
            return
        if not self.shares:
            able = [cls.type_name() for cls in registry.classes("serve") if cls.shares]
            message = f"serve.type {self.type} cannot serve many adapters on one endpoint yet"
            raise Wrong("/share", message, self.share, f"serve.type {' or '.join(able)}, or share false")
        if self.canary is not None:
            message = "a shared endpoint has no canary: its other models would be split, too"
            raise Wrong("/canary", message, f"{self.canary.percent} percent", "no canary, or share false")

    def why_unnamed(self, settings: Settings) -> str:
        """Why this deployment cannot put a model of this endpoint's type behind a name; "" if it can."""
        return ""

    def why_whole(self, job: JobSpec, settings: Settings) -> str:
        """Why this deployment cannot give a model of this endpoint's type a share of the requests; "" if it can."""
        return "" if self.splits_requests else self.no_canary()

    @classmethod
    def no_name(cls) -> str:
        """Why an endpoint of this type has no name, for one whose `takes_names` is False."""
        return f"serve.type {cls.type_name()} cannot put a model behind a name"

    @classmethod
    def no_canary(cls) -> str:
        """Why an endpoint of this type has no canary, for one whose `splits_requests` is False."""
        return f"serve.type {cls.type_name()} cannot give a model a share of the requests: its service has no weights"

    @property
    def is_named(self) -> bool:
        """Whether the model gets behind an endpoint that outlives the run."""
        return self.share or self.endpoint is not None

    @property
    def has_key(self) -> bool:
        """Whether requests need the deployment's API key."""
        return self.credential == "api_key"

    @property
    def storage_gib(self) -> int:
        """The size of the disks of all instances."""
        return 0

    def larger(self) -> Iterator[Self]:
        """The same endpoint with larger machines, the smallest of these first."""
        return iter(())

    def check(self, job: JobSpec) -> None:
        """Raise Wrong unless the rest of the spec fits this endpoint. Subclasses call this, too."""
        if self.share:
            _check_adapter(self, job)

    def demands(self, job: JobSpec) -> Iterator[Demand]:
        """The accelerators that the endpoint may request."""
        return iter(())

    def missing(self, job: JobSpec, settings: Settings) -> Iterator[SpecProblem]:
        """The images, clusters and rights that this deployment lacks for the endpoint."""
        return iter(())

    def machine_problems(self, job: JobSpec) -> Iterator[SpecProblem]:
        """Why the endpoint could not work on its machines: the image, the driver."""
        return iter(())


def _check_adapter(serve: ServeSpec, job: JobSpec) -> None:
    """Raise Wrong unless a shared endpoint can serve what the job trains."""
    adapter = job.training.adapter
    if adapter.type == "none":
        expected = "training.adapter.type lora or qlora, or serve.share false"
        raise Wrong("/training/adapter/type", "a shared endpoint serves adapters alone", adapter.type, expected)
    if adapter.r > MOST_RANK:
        message = f"a shared endpoint keeps memory for {MOST_ADAPTERS} adapters of the highest rank"
        raise Wrong("/training/adapter/r", message, adapter.r, f"at most {MOST_RANK}, or serve.share false")
    named = adapter.target_modules if isinstance(adapter.target_modules, list) else []
    if wrong := [name for name in named if name.rpartition(".")[2] in NO_ADAPTER]:
        message, expected = "vLLM has no adapters of these modules", "linear layers, or serve.share false"
        raise Wrong("/training/adapter/target_modules", message, wrong, expected)
    if job.name == serve.endpoint:
        message = "on a shared endpoint, requests for its name get the base model"
        raise Wrong("/name", message, job.name, "another name than serve.endpoint")


def one_sold(found: str, cls: type[TargetSpec | ServeSpec]) -> str:
    """What the name of an accelerator must be, and the types of the same part that have the one that was found."""
    own, part = sorted(cls.sold()), "target" if issubclass(cls, TargetSpec) else "serve"
    if named(found, own):
        return one_of(found, own)
    others = [(other.type_name(), named(found, other.sold())) for other in registry.classes(part) if other is not cls]
    elsewhere = [f"{part}.type {name!r} has {' and '.join(having)}" for name, having in others if having]
    return f"one of {', '.join(own)}; {', '.join(elsewhere)}" if elsewhere else one_of(found, own)


class _OneOf:
    """Marks a field whose type is the union of the registered classes; `type` selects the class."""

    def __init__(self, part: str) -> None:
        self.part = part

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        classes = registry.classes(self.part)
        return handler.generate_schema(Annotated[Union[classes], Field(discriminator="type")])  # noqa: UP007


AnyTarget = Annotated[TargetSpec, _OneOf("target")]
AnyServe = Annotated[ServeSpec, _OneOf("serve")]


def serving_seconds(serve: ServeSpec) -> int:
    """How long an endpoint may exist: to start, and then for its ttl."""
    return seconds(serve.startup_timeout) + seconds(serve.ttl)


class JobSpec(Part):
    """A fine-tuning job: the model, its data, the place of the training, and the use of the result."""

    model_config = ConfigDict(title="dropforge job spec", defer_build=True)  # until the platforms are known

    schema_uri: str | None = Field(default=None, alias="$schema", description="For editors: the URI of this schema.")
    api_version: Literal["dropforge/v1"] = Field(description="The version of the job spec.")
    name: Name = Field(
        description="A name for people; also the name of the served model. Several runs may have the same name."
    )
    model: Model = Field(description="The base model.")
    dataset: AnyDataset = Field(description="The training data.")
    training: Training = Field(default=Training(), description="How to train.")
    target: AnyTarget = Field(description="Where to train.")
    evaluation: Evaluation | None = Field(
        default=None,
        description="Measures the model before and after the training. Default: the training reports only its loss.",
    )
    serve: AnyServe | None = Field(description="Where to serve the model; null: train only.")
    limits: Limits = Field(default=Limits(), description="The limits of the run's cost, duration and retries.")
    notify: Notify = Field(default=Notify(), description="Who gets messages about the run.")
    secrets: Annotated[dict[EnvName, SecretName], NAMED_KEYS] = Field(
        default={},
        max_length=32,
        description="Environment variables of the training. Each value is the name of a secret: `NAME` or "
        "`NAME:VERSION`.",
    )
    labels: Annotated[dict[LabelKey, LabelValue], NAMED_KEYS] = Field(
        default={}, max_length=32, description="Labels of the run and of every resource that it creates."
    )

    @property
    def sources(self) -> dict[str, str]:
        """The model and the data sets, by their place in the spec."""
        evaluated, data = self.evaluation.source if self.evaluation else None, self.dataset.source
        listed = {"": data} if isinstance(data, str) else {f"/{place}": uri for place, uri in enumerate(data)}
        sources = {"/model/source": self.model.source}
        sources |= {f"/dataset/source{place}": uri for place, uri in listed.items()}
        return {**sources, "/evaluation/source": evaluated} if evaluated else sources

    @model_validator(mode="after")
    def _parts_match(self) -> JobSpec:
        self._check_names_are_free()
        self.target.check(self)
        self._check_dataset_fits_method()
        if self.serve is not None:
            self.serve.check(self)
        return self

    def _check_names_are_free(self) -> None:
        if taken := next((name for name in self.secrets if RESERVED_VARIABLES.fullmatch(name)), None):
            expected = "the name of a variable that only the model's hub or its code reads, such as HF_TOKEN"
            raise Wrong(f"/secrets/{taken}", "a variable that decides how the container runs", taken, expected)
        if taken := next(filter(names.is_own_label, self.labels), None):
            expected = f"another name: neither {names.MANAGED_BY} nor {names.OWN_LABELS}…"
            raise Wrong(f"/labels/{taken}", "a label that dropforge sets itself", taken, expected)
        if taken := next((key for key in self.labels if key.startswith(_GOOGLE_LABELS)), None):
            raise Wrong(f"/labels/{taken}", "a label that only Google sets", taken, f"no {_GOOGLE_LABELS}…")

    def _check_dataset_fits_method(self) -> None:
        synthetic, method = isinstance(self.dataset, SyntheticDataset), methods.method_of(self.training.method)
        if method.data == "synthetic" and not synthetic:
            expected = f'{{"type": "synthetic"}}, or training.method {methods.in_words(methods.taking("rows"))}'
            raise Wrong("/dataset", f"{method.title} takes synthetic data", self.dataset.source, expected)
        if synthetic and method.data != "synthetic":
            expected = f"training.method {methods.in_words(methods.taking('synthetic'))}"
            raise Wrong("/dataset/type", "synthetic data teaches no answers", "synthetic", expected)
        if synthetic and self.evaluation is not None:
            raise Wrong("/evaluation", "random tokens have no answers to hold out", {}, "no evaluation, or rows")
        gate = self.evaluation.gate if self.evaluation else None
        if gate is not None and gate.metric not in method.metrics:
            expected = f"one of {', '.join(method.metrics)}"
            raise Wrong("/evaluation/gate/metric", f"{method.title} does not measure this", gate.metric, expected)
        if isinstance(self.dataset, Dataset) and self.evaluation is not None:
            self._check_evaluation_has_other_rows(self.dataset, self.evaluation)

    def _check_evaluation_has_other_rows(self, dataset: Dataset, evaluation: Evaluation) -> None:
        source, split = evaluation.source, evaluation.split or dataset.split
        in_buckets = dataset.sources[0].startswith("gs://")
        same = source in (None, *dataset.sources) and (split == dataset.split or in_buckets)
        if same and (evaluation.source or evaluation.split):
            found, expected = (
                evaluation.source or evaluation.split,
                "another source or split, or holdout_fraction alone",
            )
            raise Wrong("/evaluation", "these are the rows of the training", found, expected)


def job_spec_schema() -> dict[str, Any]:
    """The JSON Schema of a job spec, for schemas/ and for editors."""
    return {"$id": SCHEMA_ID, **JobSpec.model_json_schema(by_alias=True)}
