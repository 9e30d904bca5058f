"""Training rows: read from the Hub or a bucket, converted to one form, checked, shuffled and split.

Every format becomes a conversation (or a plain text). Training then uses the chat template that ships with the model,
and serving needs only chat completions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dropforge.base.log import log
from dropforge.rows import LeftOut, Reader, Row, UnsupportedRow, UnusableRow, columns_of, form_of, kind_of
from dropforge.rows.files import BadFile, csv_rows, json_lines, not_utf8, null
from dropforge.rows.split import (
    FIRST_ROWS,
    MAX_BAD_ROWS,
    MIN_TRAIN_ROWS,
    evaluation_dataset,
    held_out_count,
    rows_to_hold_out_one,
    shuffled,
)
from dropforge.run.artifacts import Source, parse_gs_uri
from dropforge.spec import Dataset, Evaluation

from .errors import data_error, missing, place_of

RawRows = Sequence[Mapping[str, Any]]

MAX_FILE_BYTES = 8 * 2**30  # .jsonl, .json and .csv are read into memory; .parquet is mapped


@dataclass(frozen=True)
class Split:
    """Rows to train on and rows held out; no question is in both.

    `dropped` counts the rows that cannot be trained on, `unused` are the fields that nothing reads.
    """

    train: list[Row]
    held_out: list[Row]
    dropped: int
    unused: tuple[str, ...] = ()


def load_rows(dataset: Dataset, client: Any, directory: Path) -> tuple[RawRows, Source]:
    """The raw rows and their exact source. Raises JobError."""
    if dataset.source.startswith("gs://"):
        return _from_bucket(dataset, client, directory)
    return _from_hub(dataset)


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
    return (evaluation_dataset(dataset, evaluation) or dataset).source


def prepare(
    raw: RawRows,
    dataset: Dataset,
    evaluation: Evaluation | None,
    seed: int,
    other: tuple[RawRows, Dataset] | None = None,
) -> Split:
    """Shuffle, limit, convert, check and split the rows. The same seed gives the same split. Raises JobError.

    `other` are the rows to evaluate on, if no training rows are held out.
    """
    rows, dropped, unused = normalise(raw, dataset, shuffled(len(raw), seed)[: dataset.limit])
    check_texts(rows)
    if evaluation and other:
        evaluated = normalise(*other, shuffled(len(other[0]), seed)[: evaluation.max_rows]).rows
    else:
        held_out = _held_out_count(len(rows), evaluation)
        evaluated, rows = rows[:held_out], rows[held_out:]
    asked = {row.question for row in evaluated}
    train = [row for row in rows if row.question not in asked]
    if len(train) < MIN_TRAIN_ROWS:
        raise data_error(
            f"{len(train)} rows are left to train on ({len(raw)} in {dataset.source}, {dropped} unusable, "
            f"{len(evaluated)} held out, {len(rows) - len(train)} with the prompt of a held-out row); expected at "
            f"least {MIN_TRAIN_ROWS}",
            "add rows with other prompts, or lower evaluation.holdout_fraction",
        )
    return Split(train, evaluated, dropped, unused)


class Normalised(NamedTuple):
    """Rows in one form, the number of rows that cannot be trained on, and the fields that nothing reads."""

    rows: list[Row]
    dropped: int
    unused: tuple[str, ...] = ()


def normalise(raw: RawRows, dataset: Dataset, chosen: Sequence[int] | None = None) -> Normalised:
    """The `chosen` rows (all by default) in one form. Raises JobError if too many cannot be trained on.

    Rows that their author weighs with 0 are left out, and are not unusable.
    """
    if not raw:
        raise data_error(f"{dataset.source} has no rows; expected at least {MIN_TRAIN_ROWS}")
    chosen = range(len(raw)) if chosen is None else chosen
    try:
        reader = Reader(form_of(columns_of(raw[index] for index in chosen[:FIRST_ROWS]), dataset), dataset.ignore)
    except UnsupportedRow as problem:
        raise data_error(f"{dataset.source} has {problem}", problem.hint) from None
    rows: list[Row] = []
    problems: list[str] = []
    for index in chosen:
        try:
            rows.append(replace(reader(raw[index]), number=index))
        except LeftOut:
            continue
        except UnsupportedRow as problem:
            raise data_error(f"row {index} of {dataset.source} has {problem}", problem.hint) from None
        except UnusableRow as problem:
            problems.append(f"row {index}: {problem}")
        except Exception as error:  # noqa: BLE001  (one odd row of a million does not end a run)
            problems.append(f"row {index}: {place_of(error)}")
    check_problems(problems, len(chosen), dataset.source)
    if not rows:
        raise data_error(f"{dataset.source} has no answer of the assistant with a weight above 0")
    if reader.unused:
        names = ", ".join(reader.unused)
        log(f"fields of {dataset.source} that the training does not use: {names}", stage="train", severity="WARNING")
    return Normalised(rows, len(problems), tuple(reader.unused))


def check_problems(problems: Sequence[str], rows: int, source: str, most: float = MAX_BAD_ROWS) -> None:
    """Log the first rows that cannot be trained on. Raises JobError if they are more than this share of the rows."""
    if not problems:
        return
    first = "; ".join(problems[:3])
    if len(problems) > most * rows or len(problems) == rows:
        raise data_error(
            f"{len(problems)} of {rows} rows of {source} cannot be trained on; expected at most {MAX_BAD_ROWS:.0%}. "
            f"The first: {first}"
        )
    message = f"left out {len(problems)} of {rows} rows of {source}, which cannot be trained on. The first: {first}"
    log(message, stage="train", severity="WARNING")


def check_texts(rows: list[Row]) -> None:
    """Refuse a data set that repeats a single text. Raises JobError."""
    distinct = {row.content for row in rows}
    if len(distinct) < 2:
        length = len(next(iter(distinct), ""))
        raise data_error(
            f"all {len(rows)} rows are the same text of {length} characters; expected at least 2 different ones"
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


def _from_bucket(dataset: Dataset, client: Any, directory: Path) -> tuple[RawRows, Source]:
    from google.api_core.exceptions import NotFound

    bucket, name = parse_gs_uri(dataset.source)
    blob = client.bucket(bucket).get_blob(name)
    if blob is None:
        raise missing(f"the data set {dataset.source!r} does not exist", "upload it, or correct the URI")
    reader = _READERS.get(Path(name).suffix)
    if reader is None:
        raise data_error(f"the data set {dataset.source!r}: expected a name ending in {', '.join(_READERS)}")
    if blob.size > MAX_FILE_BYTES and reader is not _read_parquet:
        raise data_error(
            f"the data set {dataset.source!r} has {blob.size} bytes; "
            f"expected at most {MAX_FILE_BYTES}, or a .parquet file"
        )
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"data{Path(name).suffix}"
    try:
        blob.download_to_filename(str(path), checksum="crc32c")
    except NotFound:
        raise missing(f"the data set {dataset.source!r} was deleted", "upload it again") from None
    return reader(path), Source(uri=dataset.source, revision=f"generation {blob.generation} crc32c {blob.crc32c}")


def _read_jsonl(path: Path) -> RawRows:
    with path.open(encoding="utf-8-sig") as file:
        return _read(json_lines(file))


def _read(rows: Iterable[Mapping[str, Any]]) -> RawRows:
    try:
        return list(rows)
    except BadFile as error:
        raise data_error(str(error), *filter(None, [error.hint])) from None


def _read_json(path: Path) -> RawRows:
    """Reads a list of objects, or JSON lines: the wrong suffix is common."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=null)
    except UnicodeDecodeError as error:
        raise data_error(str(not_utf8(error))) from None
    except (ValueError, RecursionError):
        return _read_jsonl(path)
    if isinstance(rows, dict):
        return _read_jsonl(path)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise data_error(f"the data set is {kind_of(rows)}; expected a list of objects")
    return rows


def _read_csv(path: Path) -> RawRows:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return _read(csv_rows(file))


def _read_parquet(path: Path) -> RawRows:
    import datasets
    import pyarrow

    try:
        return datasets.Dataset.from_parquet(str(path), cache_dir=str(path.parent / "cache"))  # type: ignore[no-any-return]
    except (pyarrow.ArrowException, datasets.exceptions.DatasetGenerationError) as error:
        raise data_error(f"the data set is not Parquet ({type(error).__name__})") from error


_READERS: dict[str, Callable[[Path], RawRows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _from_hub(dataset: Dataset) -> tuple[RawRows, Source]:
    import datasets
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(dataset.source, revision=dataset.revision).sha or dataset.revision
        rows = datasets.load_dataset(dataset.source, dataset.config, split=dataset.split, revision=commit)
    except (datasets.exceptions.DatasetNotFoundError, datasets.exceptions.DataFilesNotFoundError) as error:
        raise missing(
            f"the data set {dataset.source!r}: {error}", "check the id, or add HF_TOKEN to `secrets`"
        ) from None
    except datasets.exceptions.DatasetGenerationError as error:
        raise data_error(f"the data set {dataset.source!r} cannot be read: {place_of(error)}") from error
    except ValueError as error:
        known = re.match(r"(Unknown split|BuilderConfig).*", str(error))  # other texts may quote a row
        raise data_error(f"the data set {dataset.source!r}: {known[0] if known else place_of(error)}") from error
    return rows, Source(uri=dataset.source, revision=commit)
