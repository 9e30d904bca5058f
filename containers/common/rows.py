"""Training rows: read from the Hub or a bucket, converted to one form, checked, shuffled and split.

Every format becomes a conversation (or a plain text). Training then uses the chat template that ships with the model,
and serving needs only chat completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dropforge.base.log import log
from dropforge.rows import Row, UnsupportedRow, columns_of, form_of
from dropforge.rows.split import (
    FIRST_ROWS,
    MAX_BAD_ROWS,
    MIN_TRAIN_ROWS,
    evaluation_dataset,
    held_out_count,
    rows_to_hold_out_one,
    shuffled,
)
from dropforge.run.artifacts import Source
from dropforge.spec import Dataset, Evaluation

from .errors import data_error
from .raw_rows import RawRows, from_bucket, from_hub
from .read_rows import Numbers, ReadRows, judge, values_of


@dataclass(frozen=True)
class Split:
    """Rows to train on and rows held out; no question is in both.

    `dropped` counts the rows that cannot be trained on, `unused` are the fields that nothing reads.
    """

    train: ReadRows
    held_out: list[Row]
    dropped: int
    unused: tuple[str, ...] = ()


def load_rows(dataset: Dataset, client: Any, directory: Path) -> tuple[RawRows, Source]:
    """The raw rows and their exact source. Raises JobError."""
    if dataset.sources[0].startswith("gs://"):
        return from_bucket(dataset, client, directory)
    return from_hub(dataset)


def load_split(
    dataset: Dataset, evaluation: Evaluation | None, seed: int, client: Any, directory: Path
) -> tuple[Split, Source]:
    """The spec's rows, checked and split, and the exact source of the training rows. Raises JobError."""
    raw, source = load_rows(dataset, client, directory / "train")
    other = evaluation_dataset(dataset, evaluation)
    if evaluation is None or other is None:
        return prepare(raw, dataset, evaluation, seed), source
    held_out, _ = load_rows(other, client, directory / "evaluation")
    return prepare(raw, dataset, evaluation, seed, (held_out, other)), source


def held_out_source(dataset: Dataset, evaluation: Evaluation | None) -> str:
    """The source that errors about a held-out row name."""
    return (evaluation_dataset(dataset, evaluation) or dataset).title


def prepare(
    raw: Sequence[Mapping[str, Any]],
    dataset: Dataset,
    evaluation: Evaluation | None,
    seed: int,
    other: tuple[Sequence[Mapping[str, Any]], Dataset] | None = None,
) -> Split:
    """Shuffle, limit, convert, check and split the rows. The same seed gives the same split. Raises JobError.

    `other` are the rows to evaluate on, if no training rows are held out.
    """
    rows, dropped, unused = normalise(raw, dataset, _chosen(raw, seed, dataset.limit))
    check_texts(rows)
    if evaluation and other:
        evaluated = normalise(*other, _chosen(other[0], seed, evaluation.max_rows)).rows
    else:
        held_out = _held_out_count(len(rows), evaluation)
        evaluated, rows = rows[:held_out], rows[held_out:]
    train = rows.take(~np.isin(rows.asked, evaluated.asked))
    if len(train) < MIN_TRAIN_ROWS:
        raise data_error(
            f"{len(train)} rows are left to train on ({len(raw)} in {dataset.title}, {dropped} unusable, "
            f"{len(evaluated)} held out, {len(rows) - len(train)} with the prompt of a held-out row); expected at "
            f"least {MIN_TRAIN_ROWS}",
            "add rows with other prompts, or lower evaluation.holdout_fraction",
        )
    return Split(train, list(evaluated), dropped, unused)


def _chosen(raw: Sequence[Any], seed: int, limit: int | None) -> Numbers:
    return np.asarray(shuffled(len(raw), seed)[:limit], np.int64)


class Normalised(NamedTuple):
    """Rows in one form, the number of rows that cannot be trained on, and the fields that nothing reads."""

    rows: ReadRows
    dropped: int
    unused: tuple[str, ...] = ()


def normalise(raw: Sequence[Mapping[str, Any]], dataset: Dataset, chosen: Numbers | None = None) -> Normalised:
    """The `chosen` rows (all by default) in one form. Raises JobError if too many cannot be trained on.

    Rows that their author weighs with 0 are left out, and are not unusable.
    """
    if not len(raw):
        raise data_error(f"{dataset.title} has no rows; expected at least {MIN_TRAIN_ROWS}")
    raw, numbers = RawRows.of(raw), np.arange(len(raw)) if chosen is None else chosen
    columns = columns_of(values_of(raw, numbers[:FIRST_ROWS]))
    try:
        form_of(columns, dataset)
    except UnsupportedRow as problem:
        raise data_error(f"{dataset.title} has {problem}", problem.hint) from None
    rows, unusable, problems, unused = judge(raw, dataset, columns, numbers)
    check_problems(unusable, problems, len(numbers), dataset.title)
    if not rows:
        raise data_error(f"{dataset.title} has no answer of the assistant with a weight above 0")
    if unused:
        names = ", ".join(unused)
        log(f"fields of {dataset.title} that the training does not use: {names}", stage="train", severity="WARNING")
    return Normalised(rows, unusable, unused)


def check_problems(count: int, told: Sequence[str], rows: int, source: str, most: float = MAX_BAD_ROWS) -> None:
    """Log the first rows that cannot be trained on. Raises JobError if `count` is more than this share of the rows."""
    if not count:
        return
    first = "; ".join(told[:3])
    if count > most * rows or count == rows:
        raise data_error(
            f"{count} of {rows} rows of {source} cannot be trained on; expected at most {MAX_BAD_ROWS:.0%}. "
            f"The first: {first}"
        )
    message = f"left out {count} of {rows} rows of {source}, which cannot be trained on. The first: {first}"
    log(message, stage="train", severity="WARNING")


def check_texts(rows: ReadRows) -> None:
    """Refuse a data set that repeats a single row. Raises JobError."""
    if (rows.digests == rows.digests[0]).all():
        raise data_error(
            f"all {len(rows)} rows are the same text of {len(rows[0].content)} characters; expected at least 2 "
            "different ones"
        )


def _held_out_count(rows: int, evaluation: Evaluation | None) -> int:
    held_out = held_out_count(rows, evaluation)
    if evaluation is not None and not held_out:
        fraction = evaluation.holdout_fraction
        raise data_error(
            f"evaluation.holdout_fraction {fraction} of {rows} rows is less than one row; "
            f"expected at least {rows_to_hold_out_one(fraction)} rows",
            "add rows, or raise evaluation.holdout_fraction",
        )
    return held_out
