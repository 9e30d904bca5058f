"""The phase plan of a run, and the problems of phases that do not fit, each with the smallest change that would do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from dropforge.base.changes import evolve
from dropforge.base.errors import SpecProblem
from dropforge.spec.machine import GIB

from .batch import Batch, batch_of
from .maxtext import FAMILIES
from .phases import Place, Row, chosen_step, phase_rows
from .shape import ModelShape

if TYPE_CHECKING:
    from dropforge.spec import JobSpec
    from dropforge.spec.machine import Machine

_NAMES = {"accelerator": "memory of the accelerator", "host": "host memory", "disk": "disk"}


@dataclass(frozen=True)
class PhasePlan:
    """Every phase of a run with its need and its machine, and the effective batch."""

    shape: ModelShape
    rows: list[Row]
    batch: Batch

    @property
    def fits(self) -> bool:
        return not any(row.short for row in self.rows)


def plan_phases(spec: JobSpec, shape: ModelShape) -> PhasePlan:
    """The phase plan of a spec whose model has this shape."""
    return PhasePlan(shape, phase_rows(spec, shape), batch_of(spec))


def phase_problems(spec: JobSpec, shape: ModelShape, machine: Machine | None = None) -> list[SpecProblem]:
    """A problem for each resource of target and endpoint that a phase lacks, and for a family that is not converted.

    `machine` replaces the machine that the target declares: a container knows its own better.
    """
    if spec.target.trainer == "maxtext" and shape.model_type not in FAMILIES:
        expected = f"one of {', '.join(FAMILIES)}, or a target with GPUs"
        message = f"target {spec.target.type!r} cannot convert this type of model to MaxText and back"
        return [
            SpecProblem("/model/source", message, f"{spec.model.source}, of the type {shape.model_type!r}", expected)
        ]
    rows = phase_rows(spec, shape, machine)
    problems = []
    places: tuple[Place, ...] = ("target", "serve")
    for place in places:
        for resource in _NAMES:
            short = [row for row in rows if row.place == place and resource in row.short]
            if short:
                worst = min(short, key=lambda row: row.left[resource] or 0)
                problems.append(_problem(spec, shape, worst, resource))
    return problems


def _problem(spec: JobSpec, shape: ModelShape, row: Row, resource: str) -> SpecProblem:
    """The problem of the phase that lacks most of a resource."""
    machine, place = row.machine, row.place
    field = {"host": machine.host_field, "disk": machine.disk_field}.get(resource, "")
    if resource == "host" and machine.files_in_memory:
        field = machine.disk_field or field
    pointer = f"/{place}/{field}" if field else "/model/source" if place == "target" else "/serve"
    message = f"phase {row.need.phase!r} does not fit the {_NAMES[resource]}"
    found = f"{_arithmetic(spec, shape, row, resource)}; {_has(row, resource)}"
    changes = [words for words, changed in _changes(spec, row, resource) if _cures(changed, shape, place, resource)]
    kinds: dict[str, str] = {}
    for words in changes:  # the smallest change of each field
        kinds.setdefault(words.split(" ")[0], words)
    expected = " or ".join(kinds.values()) or "a smaller model, a lower training.max_length, or another target"
    return SpecProblem(pointer, message, found, expected)


def _arithmetic(spec: JobSpec, shape: ModelShape, row: Row, resource: str) -> str:
    """The need, with its parts for the phase that trains."""
    size = f"{shape.parameters / 1e9:.2f} billion parameters"
    if resource == "accelerator":
        if row.need.phase == "train" and spec.target.trainer == "trl":
            step, estimate = chosen_step(spec, shape, row.machine)
            return f"{size}: {estimate} at batch size {step.batch} and {step.length} tokens"
        return f"{size}: {_gib(row.need.accelerator)}"
    if resource == "host":
        files = f" with {_gib(row.need.disk)} of files" if row.machine.files_in_memory else ""
        return f"{size}: {_gib(row.host)}{files}"
    return f"{size}: {_gib(row.need.disk)}"


def _has(row: Row, resource: str) -> str:
    machine = row.machine
    if resource == "accelerator":
        return f"{_gib(row.accelerator_bytes)} of {_gib(machine.accelerator_bytes)} usable on {machine.accelerator}"
    return f"the machine has {_gib(machine.host_bytes if resource == 'host' else machine.disk_bytes)}"


def _changes(spec: JobSpec, row: Row, resource: str) -> Iterator[tuple[str, JobSpec]]:
    """Changes of the spec that may help: their words, and the changed spec. The smallest of each kind comes first."""
    machine, place = row.machine, row.place
    part: Any = getattr(spec, place)
    if resource == "disk" or (resource == "host" and machine.files_in_memory):
        yield from _raised(spec, place, machine.disk_field, row.need.disk)
    elif resource == "host":
        yield from _raised(spec, place, machine.host_field, row.host)
    if resource == "accelerator" and place == "target":
        yield from _smaller_steps(spec)
        if spec.target.trainer == "trl" and machine.devices == 1 and spec.training.adapter.type != "qlora":
            adapter = {"type": "qlora"}
            if spec.training.adapter.type == "lora":
                adapter = spec.training.adapter.model_dump() | adapter
            yield "training.adapter.type 'qlora'", _with(spec, "training", adapter=_qlora(adapter))
    for larger in part.larger():
        if place == "target" and larger.machine.devices > 1 and spec.training.adapter.type == "qlora":
            continue
        changed = [name for name in type(part).model_fields if getattr(larger, name) != getattr(part, name)]
        words = ", ".join(f"{name} {getattr(larger, name)!r}" for name in changed)
        yield f"{place}.{words}", evolve(spec, **{place: larger})


def _raised(spec: JobSpec, place: Place, field: str, need: int) -> Iterator[tuple[str, JobSpec]]:
    """The spec with more of a resource, if there is a field for it, and a machine with so much."""
    if not field:
        return
    part, amount = getattr(spec, place), max(10, math.ceil(need / GIB))
    with suppress(ValidationError):
        larger = type(part).model_validate({**part.model_dump(by_alias=True), field: amount})
        yield f"{place}.{field} {amount}", evolve(spec, **{place: larger})


def _smaller_steps(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    training = spec.training
    if training.gradient_checkpointing is False:
        yield "training.gradient_checkpointing true", _with(spec, "training", gradient_checkpointing=True)
    batch = training.per_device_train_batch_size or 1
    while batch > 1:
        batch //= 2
        words = f"training.per_device_train_batch_size {batch}"
        yield words, _with(spec, "training", per_device_train_batch_size=batch)


def _cures(spec: JobSpec, shape: ModelShape, place: Place, resource: str) -> bool:
    return not any(row.place == place and resource in row.short for row in phase_rows(spec, shape))


def _with(spec: JobSpec, part: str, **changes: Any) -> JobSpec:
    return evolve(spec, **{part: evolve(getattr(spec, part), **changes)})


def _qlora(fields: dict[str, Any]) -> Any:
    from dropforge.spec.sections import QloraAdapter

    return QloraAdapter.model_validate(fields)


def _gib(count: int | None) -> str:
    return "an unknown amount" if count is None else f"{count / GIB:.1f} GiB"
