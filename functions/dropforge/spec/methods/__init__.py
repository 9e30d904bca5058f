"""The training methods, by `training.method`: what each one declares.

A new method is a module here and its name in METHODS. Its training is a module of the same name in the `methods` of
each image that trains by it (containers/train_trl, containers/train_maxtext). Everything else reads its declaration:
the job spec, the targets that take it, the effective batch, and the memory and disk of every phase.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ..metrics import MetricName

Trainer = Literal["trl", "maxtext"]  # the software of a training container
METHODS: dict[str, str] = {"sft": f"{__name__}.sft", "pretrain": f"{__name__}.pretrain"}


@dataclass(frozen=True)
class Method:
    """The declaration of a training method.

    `title`: the method in words. `trainers`: the software that trains by it. `data`: it takes the rows of a data set,
    or random tokens. `starts_from_base`: the training begins with the weights of the model, and not with random ones.
    `sequences_per_row`: how many sequences a row becomes; a pair of answers is two. `frozen_models`: the models that a
    step holds beside the one that it trains, such as a reference, if every weight is trained, and `frozen_of_adapter`
    those beside an adapter, whose own model without it can be the reference. `metrics`: what it measures on held-out
    rows.
    """

    title: str
    trainers: tuple[Trainer, ...]
    data: Literal["rows", "synthetic"]
    starts_from_base: bool
    metrics: tuple[MetricName, ...]
    sequences_per_row: int = 1
    frozen_models: int = 0
    frozen_of_adapter: int = 0

    def frozen_beside(self, adapter: str) -> int:
        """The models that a step holds beside the trained one, by the type of the spec's adapter."""
        return self.frozen_models if adapter == "none" else self.frozen_of_adapter


def method_of(name: str) -> Method:
    """The declaration of a method. Raises KeyError for an unknown name: specs are validated before."""
    declared: Method = import_module(METHODS[name]).METHOD
    return declared


def trained_by(trainer: Trainer) -> tuple[str, ...]:
    """The methods that a trainer has."""
    return tuple(name for name in METHODS if trainer in method_of(name).trainers)


def taking(data: str) -> tuple[str, ...]:
    """The methods that take such data."""
    return tuple(name for name in METHODS if method_of(name).data == data)


def in_words(names: Iterable[str]) -> str:
    """Names of methods for people."""
    return " or ".join(map(repr, names))


class OneOfMethods:
    """Marks the field whose value is the name of a method."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(METHODS))
