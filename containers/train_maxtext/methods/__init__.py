"""The training methods of this image, by `training.method` of the job spec.

A method that dropforge/spec/methods declares for `maxtext` has a module of its name here, with the functions of
`Method`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from containers.common.errors import config_error
from containers.common.evaluation import NO_LIMIT, AnswerLimit
from containers.common.publish import Description
from dropforge.rows import Row
from dropforge.run.artifacts import Source
from dropforge.spec import JobSpec
from dropforge.spec.methods import trained_by

from ..batches import Data
from ..work import Work


@dataclass(frozen=True)
class Prepared:
    """The token ids to train on, their source, and counts of the rows behind them.

    `sealed` are the rows whose answers may seal the model: held-out rows, or training rows where none are held out.
    `limit` is that of a judged answer.
    """

    data: Data
    source: Source
    packing: bool = False
    held_out: tuple[Row, ...] = ()
    sealed: tuple[Row, ...] = ()
    dropped: int = 0
    truncated: int = 0
    answers: tuple[int, int] = (0, 0)  # those that the rows have, and those that are learnt whole
    unused_fields: tuple[str, ...] = ()
    limit: AnswerLimit = NO_LIMIT


class Method(Protocol):
    """The functions of a method's module."""

    def read(self, work: Work, client: Any, base: str, tokenizer: Any, vocabulary: int, tpu: bool) -> Prepared:
        """The rows that the method takes, as token ids below `vocabulary`. Raises JobError."""

    def describe(self, spec: JobSpec) -> Description:
        """The method's words on the model card."""


def load_method(name: str) -> Method:
    """Import a method's module. Raises JobError for an unknown method."""
    if name not in (known := trained_by("maxtext")):
        raise config_error(f"training.method is {name!r}; expected one of {', '.join(known)}")
    return cast(Method, import_module(f"{__name__}.{name}"))
