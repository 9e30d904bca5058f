"""The two open parts of a spec, `target` and `serve`: each platform brings its own classes.

`TargetSpec` and `ServeSpec` are the base classes. JobSpec's fields have the types `AnyTarget` and `AnyServe`. These
become unions of the registered classes when the first spec is read, so this package never imports a platform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from . import registry
from .parts import Part, Wrong, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .job import JobSpec
    from .parts import PlacementSpec


@dataclass(frozen=True)
class Accelerators:
    """What an attempt trains on: the number of accelerators (or slices), their name, and their memory in all."""

    count: int
    name: str
    memory_gib: float


class TargetSpec(Part):
    """Where a run trains. Subclasses have a `type` of their own and what only this target has."""

    if TYPE_CHECKING:
        type: str

        @property
        def placements(self) -> Sequence[PlacementSpec]: ...

    @property
    def accelerators(self) -> Accelerators:
        """What an attempt trains on."""
        raise NotImplementedError

    def check(self, job: JobSpec) -> None:
        """Raise Wrong unless the rest of the spec fits this target."""
        if job.training.method == "pretrain":
            message, expected = f"target {self.type} does not pre-train", "'sft', or target tpu_vm or ray"
            raise Wrong("/training/method", message, "pretrain", expected)


class ServeSpec(Part):
    """Where a run's model is served. Subclasses have a `type` of their own and what only this endpoint has."""

    if TYPE_CHECKING:
        type: str
        max_model_len: int
        max_num_seqs: int
        startup_timeout: str
        ttl: str

        @property
        def min_instances(self) -> int: ...
        @property
        def max_instances(self) -> int: ...

    def check(self, job: JobSpec) -> None:
        """Raise Wrong unless the rest of the spec fits this endpoint."""


class _OneOf:
    """Marks a field whose type is the union of the registered classes, told apart by `type`."""

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


def check_full_training(job: JobSpec) -> None:
    """Raise Wrong if the spec asks for an adapter: MaxText trains every weight."""
    if (adapter := job.training.adapter.type) != "none":
        given = "training" in job.model_fields_set and "adapter" in job.training.model_fields_set
        pointer = "/training/adapter/type" if given else "/training"
        raise Wrong(pointer, "on TPUs every weight is trained", adapter, "'none'")
