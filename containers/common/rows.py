"""Training rows: read from the Hub or a bucket, converted to one form, checked, shuffled and split.

Every format becomes a conversation (or a plain text). Training then uses the chat template that ships with the model,
and serving needs only chat completions.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dropforge.run.artifacts import Source, parse_gs_uri
from dropforge.spec import Columns, Dataset, Evaluation
from dropforge.spec.templates import FORMS, MAX_CSV_FIELD, columns_in, shown_columns

from .errors import JobError, data_error, missing, place_of

Message = dict[str, str]
RawRows = Sequence[Mapping[str, Any]]

MIN_TRAIN_ROWS = 8
MAX_BAD_ROWS = 0.1  # share of the rows; fewer are dropped, and the log counts them
MAX_FILE_BYTES = 8 * 2**30  # .jsonl, .json and .csv are read into memory; .parquet is mapped
ROLES = ("system", "user", "assistant")
# Parts of OpenAI's format that dropforge does not train on. https://platform.openai.com/docs/guides/fine-tuning
UNSUPPORTED = ("tool_calls", "function_call", "tool_call_id", "refusal", "audio")


@dataclass(frozen=True)
class Row:
    """A conversation that ends with the assistant's answer; or a plain text, without messages.

    `muted` are the indices of the assistant's earlier messages that are read and not learnt (OpenAI's "weight": 0).
    `number` is the row's place in the data set, from 0.
    """

    messages: tuple[Message, ...]
    text: str = ""
    muted: frozenset[int] = frozenset()
    number: int = field(default=0, compare=False)

    @property
    def prompt(self) -> list[Message]:
        return list(self.messages[:-1])

    @property
    def answer(self) -> str:
        return self.messages[-1]["content"]

    @property
    def question(self) -> str:
        """The text before the answer; two rows with one question must not be on both sides of the split."""
        return self.text or json.dumps(self.prompt, ensure_ascii=False)

    @property
    def content(self) -> str:
        """The whole text of the row, to count and compare."""
        return self.text or "\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True)
class Split:
    """Rows to train on and rows held out; no question is in both."""

    train: list[Row]
    held_out: list[Row]
    dropped: int


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


def evaluation_dataset(dataset: Dataset, evaluation: Evaluation | None) -> Dataset | None:
    """The data set to evaluate on, in the form of the training rows; None where training rows are held out."""
    if evaluation is None or not (evaluation.source or evaluation.split):
        return None
    changes: dict[str, Any] = {"split": evaluation.split or dataset.split, "limit": None}
    if evaluation.source not in (None, dataset.source):
        changes |= {"source": evaluation.source, "config": None, "revision": "main"}
    return dataset.model_copy(update=changes)


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
    rows, dropped = normalise(raw, dataset, _shuffled(len(raw), seed)[: dataset.limit])
    check_texts(rows)
    if evaluation and other:
        evaluated, _ = normalise(*other, _shuffled(len(other[0]), seed)[: evaluation.max_rows])
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
    return Split(train, evaluated, dropped)


def _shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def normalise(raw: RawRows, dataset: Dataset, chosen: Sequence[int] | None = None) -> tuple[list[Row], int]:
    """The `chosen` rows (all by default) in one form, and the number of unusable rows.

    Raises JobError if too many are unusable.
    """
    if not raw:
        raise data_error(f"{dataset.source} has no rows; expected at least {MIN_TRAIN_ROWS}")
    chosen = range(len(raw)) if chosen is None else chosen
    convert = _converter(raw[chosen[0]], dataset)
    rows: list[Row] = []
    problems: list[str] = []
    for index in chosen:
        try:
            rows.append(replace(convert(raw[index]), number=index))
        except UnsupportedRow as problem:
            raise data_error(
                f"row {index} of {dataset.source} has {problem}",
                "dropforge trains on messages of text; take such rows out of the data set, or write the calls as text",
            ) from None
        except UnusableRow as problem:
            problems.append(f"row {index}: {problem}")
    if len(problems) > MAX_BAD_ROWS * len(chosen):
        raise data_error(
            f"{len(problems)} of {len(chosen)} rows cannot be trained on; expected at most {MAX_BAD_ROWS:.0%}. "
            f"The first: {'; '.join(problems[:3])}"
        )
    return rows, len(problems)


def check_texts(rows: list[Row]) -> None:
    """Refuse a data set that repeats a single text. Raises JobError."""
    distinct = {row.content for row in rows}
    if len(distinct) < 2:
        length = len(next(iter(distinct), ""))
        raise data_error(
            f"all {len(rows)} rows are the same text of {length} characters; expected at least 2 different ones"
        )


class UnusableRow(ValueError):
    """A row that cannot be trained on, and the reason."""


class UnsupportedRow(ValueError):
    """A row with a part that dropforge does not train on. Without that part, the row would teach something else."""


def _converter(first: Mapping[str, Any], dataset: Dataset) -> Callable[[Mapping[str, Any]], Row]:
    """The function that converts a row: by the spec's templates or format, else by the first row's columns."""
    if dataset.columns is not None:
        return _by_templates(dataset.columns, first)
    converters = {"messages": _from_messages, "prompt_completion": _from_prompt_completion, "text": _from_text}
    wanted = [dataset.format] if dataset.format in FORMS else list(FORMS)
    for name in wanted:
        if all(column in first for column in FORMS[name]):
            return converters[name]
    expected = " or ".join("+".join(FORMS[name]) for name in wanted)
    raise data_error(
        f"{dataset.source} has the columns {shown_columns(first)}; expected {expected} (format {dataset.format!r})",
        "name the columns in dataset.columns, as in {'prompt': 'Question: {question}', 'completion': '{answer}'}",
    )


def _by_templates(columns: Columns, first: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Row]:
    parts = {"system": columns.system, "prompt": columns.prompt, "completion": columns.completion}
    for name, template in parts.items():
        for column in _fields(template or "", name):
            if column not in first:
                raise data_error(
                    f"dataset.columns.{name} names the column {column!r}; the data set has {shown_columns(first)}"
                )

    def convert(values: Mapping[str, Any]) -> Row:
        def fill(template: str) -> str:
            return template.format_map({name: _plain(values.get(name), name) for name in _fields(template, "prompt")})

        prompt = [{"role": "user", "content": fill(columns.prompt)}]
        if columns.system is not None:
            prompt.insert(0, {"role": "system", "content": fill(columns.system)})
        return _conversation(prompt, fill(columns.completion))

    return convert


def _fields(template: str, where: str) -> list[str]:
    """The columns that a template names."""
    try:
        return columns_in(template)
    except ValueError as error:
        raise data_error(f"dataset.columns.{where} is not a template: {error}; write {{{{ for a brace") from None


def _from_messages(values: Mapping[str, Any]) -> Row:
    messages = _column(values, "messages")
    if not isinstance(messages, list) or not messages:
        raise UnusableRow(f"`messages` is {_kind(messages)}; expected a list of {{role, content}}")
    for name in ("tools", "functions"):
        if values.get(name):
            raise UnsupportedRow(f"`{name}`; expected none")
    read = [_message(message) for message in messages]
    learnt = [_is_learnt(message) for message in messages]
    while read and not learnt[len(read) - 1]:
        read.pop()  # training learns nothing from messages after the last answer
    if not read:
        raise UnusableRow("no message is an answer of the assistant with a weight above 0")
    row = _conversation(read[:-1], read[-1]["content"])
    muted = (at for at, message in enumerate(read) if message["role"] == "assistant" and not learnt[at])
    return replace(row, muted=frozenset(muted))


def _message(message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise UnusableRow(f"a message is {_kind(message)}; expected an object with a role and a content")
    for name in UNSUPPORTED:
        if message.get(name):
            raise UnsupportedRow(f"a message with `{name}`; expected a role and a content")
    role = message.get("role")
    if role in ("tool", "function"):
        raise UnsupportedRow(f"a message of the role {role!r}; expected {', '.join(ROLES)}")
    if role not in ROLES:
        raise UnusableRow(f"the role of a message is {_kind(role)}; expected {', '.join(ROLES)}")
    return {"role": str(role), "content": _plain(message.get("content"), "content")}


def _is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer to learn. `weight` is 0 or 1, as in OpenAI's format."""
    weight = message.get("weight")
    if weight is not None and weight not in (0, 1):
        raise UnsupportedRow(f"a message whose weight is {_kind(weight)}; expected 0 or 1")
    return message["role"] == "assistant" and weight != 0


def _from_prompt_completion(values: Mapping[str, Any]) -> Row:
    prompt, completion = _column(values, "prompt"), _column(values, "completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return _from_messages({**values, "messages": [*prompt, *completion]})
    return _conversation([{"role": "user", "content": _plain(prompt, "prompt")}], _plain(completion, "completion"))


def _from_text(values: Mapping[str, Any]) -> Row:
    text = _plain(_column(values, "text"), "text")
    if len(text.strip()) <= 1:
        raise UnusableRow(f"the text is {_kind(text)}; expected more than one character")
    return Row((), text)


def _conversation(prompt: list[Message], answer: str) -> Row:
    question = prompt[-1]["content"] if prompt else ""
    # `text[0]` of a string instead of a list leaves one character of each row.
    if len(question.strip()) <= 1:
        raise UnusableRow(f"the prompt is {_kind(question)}; expected more than one character")
    if not answer.strip():
        raise UnusableRow("the completion is empty")
    return Row((*prompt, {"role": "assistant", "content": answer}))


def _column(values: Mapping[str, Any], name: str) -> Any:
    if name not in values:
        raise UnusableRow(f"the column {name!r} is missing")
    return values[name]


def _plain(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return str(value)
    raise UnusableRow(f"{name!r} is {_kind(value)}; expected text")


def _kind(value: Any) -> str:
    """A value of a row by its kind and size. Errors reach records and Slack, so they never quote a row."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    if isinstance(value, bool | int | float):
        return "a number" if not isinstance(value, bool) else "true or false"
    if isinstance(value, Mapping):
        return f"an object with {len(value)} fields"
    return f"a list of {len(value)}" if isinstance(value, list) else f"a {type(value).__name__}"


def _held_out_count(rows: int, evaluation: Evaluation | None) -> int:
    if evaluation is None:
        return 0
    wanted = int(rows * evaluation.holdout_fraction)
    if wanted < 1:
        least = math.ceil(1 / evaluation.holdout_fraction)  # one less than enough for some fractions, by rounding
        needed = least if int(least * evaluation.holdout_fraction) else least + 1
        raise data_error(
            f"evaluation.holdout_fraction {evaluation.holdout_fraction} of {rows} rows is less than one row; "
            f"expected at least {needed} rows",
            "add rows, or raise evaluation.holdout_fraction",
        )
    return min(wanted, evaluation.max_rows)


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
    return list(_json_lines(path))


def _json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(_decoded(file, path), start=1):
            if line.strip():
                yield _json_row(line, f"line {number}")


def _decoded(file: Any, path: Path) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None


def _not_utf8(error: UnicodeDecodeError) -> JobError:
    return data_error(f"the data set is not UTF-8 text: {error.reason}")


def _json_row(text: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise data_error(f"{where} of the data set is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        raise data_error(f"{where} of the data set cannot be read: {type(error).__name__}") from None
    if not isinstance(row, dict):
        raise data_error(f"{where} of the data set is {_kind(row)}; expected an object")
    return row


def _read_json(path: Path) -> RawRows:
    """Reads a list of objects, or JSON lines: the wrong suffix is common."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None
    except (ValueError, RecursionError):
        return _read_jsonl(path)
    if isinstance(rows, dict):
        return _read_jsonl(path)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise data_error(f"the data set is {_kind(rows)}; expected a list of objects")
    return rows


def _read_csv(path: Path) -> RawRows:
    csv.field_size_limit(MAX_CSV_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(_decoded(file, path), strict=True)
        try:
            return list(reader)
        except csv.Error as error:
            if str(error).startswith("field larger"):
                raise data_error(
                    f"line {reader.line_num + 1} of the data set has a field of more than {MAX_CSV_FIELD} characters",
                    "look for a quote that is not closed, or split the text into several rows",
                ) from None
            raise data_error(f"the data set is not CSV: {error}") from None


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
