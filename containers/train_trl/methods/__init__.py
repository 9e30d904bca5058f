"""The training methods of this image, by `training.method` of the job spec.

A method that dropforge/spec/methods declares for `trl` has a module of its name here, with the functions of `Method`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from containers.common.chat import Encoded
from containers.common.errors import config_error
from containers.common.evaluation import Score
from containers.common.publish import Description, Metrics
from containers.common.rows import Split
from containers.common.token_rows import TokenRows
from containers.common.tokenise import Tokeniser
from dropforge.run.artifacts import Source
from dropforge.spec import JobSpec
from dropforge.spec.methods import trained_by

from ..plan import Plan

Columns = Mapping[str, TokenRows]


@dataclass(frozen=True)
class Examples:
    """The data set as a method trains on it. `source` is its exact source.

    `columns` are the columns of the trainer's data set, `lengths` the tokens of each of its rows. `held_out` is None
    where no rows are held out. `answers` counts the answers of the training rows, and those that are learnt whole.
    """

    source: Source
    columns: Columns
    lengths: list[int]
    split: Split
    held_out: Encoded | None
    dropped: int
    truncated: int
    answers: tuple[int, int] = (0, 0)


class Method(Protocol):
    """The functions of a method's module."""

    def read_examples(self, spec: JobSpec, tokeniser: Tokeniser, client: Any, directory: Path) -> Examples:
        """The rows that the method takes, downloaded to `directory`, checked and encoded. Raises JobError."""

    def build_trainer(
        self, model: Any, spec: JobSpec, columns: Columns, tokenizer: Any, plan: Plan, directory: Path
    ) -> Any:
        """A trainer with RowOrder (trainer.py), which writes its checkpoints to `directory`."""

    def evaluate(self, model: Any, tokenizer: Any, examples: Examples, max_new_tokens: int) -> Score:
        """The model's score on the held-out examples."""

    def metrics(self, before: Score, after: Score) -> Metrics:
        """The manifest's metrics of the base model's and the trained model's score."""

    def describe(self, spec: JobSpec) -> Description:
        """The method's words on the model card."""


def load_method(name: str) -> Method:
    """Import a method's module, with its libraries. Raises JobError for an unknown method."""
    if name not in (known := trained_by("trl")):
        raise config_error(f"training.method is {name!r}; expected one of {', '.join(known)}")
    return cast(Method, import_module(f"{__name__}.{name}"))
