"""`dropforge data check` with a model: the trainer's own code makes the token ids of rows on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dropforge.base.errors import DropforgeError
from dropforge.rows.check import Finding
from dropforge.rows.files import Raw
from dropforge.spec import Dataset, Evaluation
from dropforge.spec.sections import Model, Training

if TYPE_CHECKING:
    from containers.common.chat import Encoded


@dataclass(frozen=True)
class Part:
    """A text of a sequence, and whether the model learns it."""

    text: str
    is_learnt: bool


@dataclass(frozen=True)
class Shown:
    """A sequence as the model will see it, and the number of its row."""

    row: int
    parts: list[Part]


@dataclass(frozen=True)
class Tokens:
    """The token ids of the rows to train on. `lengths` are those of the sequences before they are cut."""

    rows: int
    lengths: list[int] = field(default_factory=list)
    tokens: int = 0  # after the cut
    learnt: int = 0
    cut: int = 0
    dropped: int = 0
    answers_given: int = 0
    answers_learnt: int = 0
    shown: list[Shown] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def why_no_model() -> str:
    """Why no token ids can be made here; "" if they can."""
    missing = [name for name in ("transformers", "numpy") if find_spec(name) is None]
    return f"{' and '.join(missing)} is not installed (pip install 'dropforge[train]')" if missing else ""


def trainer() -> Any:
    """The trainer's modules of rows and of chat templates, which are beside this command in the repository."""
    from dropforge_local.stack.config import find_containers

    find_containers()
    from containers.common import chat, rows, training_template

    return rows, chat, training_template


def tokens_of(
    raw: Sequence[Raw],
    other: tuple[Sequence[Raw], Dataset] | None,
    dataset: Dataset,
    evaluation: Evaluation | None,
    training: Training,
    model: Model,
    show: int,
) -> Tokens:
    """Make the token ids of the rows as the trainer does; what it refuses is a finding."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rows, chat, training_template = trainer()
    lengths: list[int] = []
    try:
        split = rows.prepare(raw, dataset, evaluation, training.seed, other)
        tokenizer, _ = training_template.training_tokenizer(model.source, model, lambda: datetime.now(UTC).date())
        chunk = chat.encode_chunk(tokenizer, split.train, training.max_length, dataset.title, training.learn)
        lengths = chunk.lengths.tolist()
        encoded = chat.join(tokenizer, split.train, [chunk], training.max_length, dataset.title)
        if split.held_out:
            chat.encode(tokenizer, split.held_out, training.max_length, rows.held_out_source(dataset, evaluation))
    except DropforgeError as error:
        finding = Finding("refused", str(error), getattr(error, "hint", "") or "docs/data-formats.md")
        return Tokens(len(raw), lengths, findings=[finding])
    findings = [
        Finding("fault", f"not usable with this model: {told}", "correct the row, or take it out")
        for told in list(chunk.problems.values())[:1]
    ]
    return Tokens(
        len(split.train),
        lengths,
        len(encoded.input_ids.values),
        int((encoded.labels.values != chat.IGNORED).sum()),
        encoded.truncated,
        encoded.dropped,
        encoded.given,
        encoded.learnt,
        [
            _shown(tokenizer, encoded, at, split.train[row].number)
            for at, row in enumerate(encoded.rows[:show].tolist())
        ],
        findings,
    )


def _shown(tokenizer: Any, encoded: Encoded, at: int, row: int) -> Shown:
    pairs = zip(encoded.input_ids[at], encoded.labels[at], strict=True)
    parts = groupby(pairs, key=lambda pair: pair[0] == pair[1])
    return Shown(row, [Part(tokenizer.decode([token for token, _ in group]), learnt) for learnt, group in parts])
