"""Rows in their one form, read from the raw rows when they are needed, so that few of them are in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple, overload

import numpy as np

from dropforge.rows import LeftOut, Reader, Row, UnsupportedRow, UnusableRow, form_of
from dropforge.rows.files import BadFile
from dropforge.spec import Dataset

from .errors import data_error, place_of
from .processes import MAX_PROCESSES, cores, in_processes
from .raw_rows import RawRows

CHUNK_ROWS = 2048
# Below, a single process is done before others have started: a process imports transformers first, which takes seconds.
PARALLEL_CHARACTERS = 8_000_000
SAMPLED_ROWS = 100  # whose length stands for that of all rows
FIRST_PROBLEMS = 3  # that messages name

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Digests = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True, eq=False)
class ReadRows(Sequence[Row]):
    """The raw rows of these `numbers`, each of which the reader of the data set's form accepts.

    `digests` are digests of the rows, and `asked` those of their questions.
    """

    raw: RawRows
    dataset: Dataset
    columns: tuple[str, ...]
    numbers: Numbers
    digests: Digests
    asked: Digests

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> ReadRows: ...

    def __getitem__(self, index: int | slice) -> Row | ReadRows:
        if isinstance(index, slice):
            return self.take(index)
        return next(iter(self.take(slice(range(len(self))[index], range(len(self))[index] + 1))))

    def __iter__(self) -> Iterator[Row]:
        reader = _reader(self.columns, self.dataset)
        for start in range(0, len(self), CHUNK_ROWS):
            numbers = self.numbers[start : start + CHUNK_ROWS]
            for number, values in zip(numbers.tolist(), values_of(self.raw, numbers), strict=True):
                yield replace(reader(values), number=number, within=self.raw.within(number))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReadRows) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def take(self, chosen: Any) -> ReadRows:
        """The rows of a slice, or of an array of places or of truths."""
        return replace(self, numbers=self.numbers[chosen], digests=self.digests[chosen], asked=self.asked[chosen])


def _reader(columns: Sequence[str], dataset: Dataset) -> Reader:
    return Reader(form_of(columns, dataset), dataset.ignore)


def values_of(raw: RawRows, numbers: Numbers) -> Sequence[Mapping[str, Any]]:
    """The raw rows of these numbers. Raises JobError for a broken file."""
    try:
        return raw.many(numbers.tolist())
    except BadFile as problem:
        raise data_error(str(problem), *filter(None, [problem.hint])) from None


class Judged(NamedTuple):
    """The rows that the reader accepts, the number of unusable rows, and the messages of the first of these.

    A row whose weight is 0 is neither accepted nor unusable. `unused` are the fields that nothing reads.
    """

    rows: ReadRows
    unusable: int
    problems: tuple[str, ...]
    unused: tuple[str, ...]


class _Chunk(NamedTuple):
    numbers: Numbers
    digests: Digests
    asked: Digests
    unusable: int
    problems: list[str]
    unused: list[str]


def judge(raw: RawRows, dataset: Dataset, columns: Sequence[str], numbers: Numbers) -> Judged:
    """Read the rows of these numbers once, on all cores. Raises JobError for a row that no training may have."""
    none = np.empty(0, np.uint64)
    rows = ReadRows(raw, dataset, tuple(columns), numbers, none, none)
    parts = (replace(rows, numbers=numbers[start : start + CHUNK_ROWS]) for start in range(0, len(numbers), CHUNK_ROWS))
    sample = values_of(raw, numbers[:SAMPLED_ROWS])
    processes = processes_for(len(numbers), sum(len(str(values)) for values in sample) / len(sample))
    what = f"read the rows of {dataset.title}"
    chunks = list(map(_judge, parts) if processes == 1 else in_processes(_judge, parts, processes, what))
    known = replace(
        rows,
        numbers=np.concatenate([chunk.numbers for chunk in chunks]),
        digests=np.concatenate([chunk.digests for chunk in chunks]),
        asked=np.concatenate([chunk.asked for chunk in chunks]),
    )
    problems = tuple(problem for chunk in chunks for problem in chunk.problems)[:FIRST_PROBLEMS]
    unused = tuple(dict.fromkeys(name for chunk in chunks for name in chunk.unused))
    return Judged(known, sum(chunk.unusable for chunk in chunks), problems, unused)


def _judge(rows: ReadRows) -> _Chunk:
    """A part of the rows. Raises JobError for a broken file and for a row that no training may have."""
    reader, title = _reader(rows.columns, rows.dataset), rows.dataset.title
    accepted: list[int] = []
    digests, asked, problems = [], [], []
    for number, row in zip(rows.numbers.tolist(), values_of(rows.raw, rows.numbers), strict=True):
        try:
            read = reader(row)
        except LeftOut:
            continue
        except UnsupportedRow as problem:
            place = f"row {number}{rows.raw.within(number)} of {title}"
            raise data_error(f"{place} has {problem}", problem.hint) from None
        except UnusableRow as problem:
            problems.append(f"row {number}{rows.raw.within(number)}: {problem}")
        except Exception as error:  # noqa: BLE001  (one odd row of a million does not end a run)
            problems.append(f"row {number}{rows.raw.within(number)}: {place_of(error)}")
        else:
            accepted.append(number)
            digests.append(digest_of(read))
            asked.append(_short_digest(read.question))
    return _Chunk(
        np.array(accepted, np.int64),
        np.array(digests, np.uint64),
        np.array(asked, np.uint64),
        len(problems),
        problems[:FIRST_PROBLEMS],
        [*reader.unused],
    )


def digest_of(row: Row) -> int:
    """A digest of all that decides the row's token ids."""
    return _short_digest(json.dumps([row.messages, row.text, sorted(row.muted), row.tools]))


def digests_of(rows: Sequence[Row]) -> Digests:
    return rows.digests if isinstance(rows, ReadRows) else np.array([digest_of(row) for row in rows], np.uint64)


def _short_digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def processes_for(rows: int, characters: float) -> int:
    """How many processes work fastest on so many rows of so many characters each."""
    return 1 if rows * characters < PARALLEL_CHARACTERS else min(cores(), MAX_PROCESSES)


def mean_characters(rows: Sequence[Row]) -> float:
    """The length of a row, by the first ones: the rows are shuffled."""
    return sum(len(row.content) for row in rows[:SAMPLED_ROWS]) / max(1, len(rows[:SAMPLED_ROWS]))
