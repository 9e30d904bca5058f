"""The rows of a data set as its files have them, read one by one from the disk.

Files become one file of JSON lines, and the places of the rows in it. So the memory does not grow with the rows, and
every process reads the rows that it needs.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dropforge.base.log import log
from dropforge.rows.files import BadFile, json_row, text_of_file, text_rows
from dropforge.rows.sources import ARROW, MAX_BYTES, File, NoFiles, files_of, format_of, one_format
from dropforge.rows.tables import table_columns, table_lines, unpacked
from dropforge.run.artifacts import Source
from dropforge.spec import Dataset
from dropforge.spec.templates import shown_columns

from .errors import data_error, missing, place_of

STARTS_AT_ONCE = 1 << 16  # numbers that are written at once

Raw = Mapping[str, Any]


class RawRows(Sequence[Raw]):
    """The rows of a data set by their numbers, and the files that have them.

    `firsts` are the numbers of the first rows of `files`. A process that gets the rows opens their files once.
    """

    def __init__(self, rows: Sequence[Raw], files: Sequence[str] = (), firsts: Sequence[int] = ()) -> None:
        self._rows, self._files, self._firsts = rows, tuple(files), tuple(firsts)

    @classmethod
    def of(cls, rows: Sequence[Raw]) -> RawRows:
        return rows if isinstance(rows, RawRows) else cls(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        """Raises BadFile."""
        return self._rows[number]

    def many(self, numbers: Sequence[int]) -> Sequence[Raw]:
        """The rows of these numbers: a table reads them at once. Raises BadFile."""
        at_once = getattr(self._rows, "__getitems__", None)  # of a datasets.Dataset
        return at_once(numbers) if at_once else [self._rows[number] for number in numbers]

    def within(self, number: int) -> str:
        """The place of a row in its file, as ` (row 3 of part-2.jsonl)`; "" for a data set of one file."""
        if len(self._files) < 2:
            return ""
        file = bisect_right(self._firsts, number) - 1
        return f" (row {number - self._firsts[file]} of {self._files[file].rpartition('/')[2]})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self._pickled,)

    @cached_property
    def _pickled(self) -> bytes:
        return pickle.dumps((self._rows, self._files, self._firsts))


@lru_cache(maxsize=4)
def _opened(pickled: bytes) -> RawRows:
    return RawRows(*pickle.loads(pickled))


@dataclass(frozen=True)
class LineRows(Sequence[Raw]):
    """Rows of a file of JSON lines in UTF-8; `<path>.starts` has the place of each row, as 64-bit integers.

    `files` has the place of the first byte of each file that was joined, with the file's name in messages.
    """

    path: Path
    files: tuple[tuple[int, str], ...]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: Any) -> Any:
        """Raises BadFile, which names the line, and the file if there are several."""
        number = range(len(self))[number]
        start = int(self._starts[number])
        end = int(self._starts[number + 1]) if number + 1 < len(self) else self.path.stat().st_size
        text = str(self._read(start, end).partition(b"\n")[0], "utf-8")
        try:
            return json_row(text, "")
        except BadFile:
            first, name = self.files[bisect_right(self.files, start, key=lambda file: file[0]) - 1]
            return json_row(text, f"{name}line {1 + self._lines(first, start)}")

    def _lines(self, start: int, end: int) -> int:
        return sum(self._read(at, min(at + (1 << 20), end)).count(b"\n") for at in range(start, end, 1 << 20))

    def _read(self, start: int, end: int) -> bytes:
        return os.pread(self._descriptor, end - start, start)

    @cached_property
    def _starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        path = starts_of(self.path)
        return np.memmap(path, np.int64, "r") if path.stat().st_size else np.empty(0, np.int64)

    @cached_property
    def _descriptor(self) -> int:
        """The open file. A memory map of it would count as the memory of each process that has read it."""
        descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "files": self.files}


def starts_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.starts")


def from_bucket(dataset: Dataset, client: Any, directory: Path) -> tuple[RawRows, Source]:
    """The rows of a data set in buckets, downloaded to `directory`, and its exact source. Raises JobError."""
    from google.api_core.exceptions import NotFound

    directory.mkdir(parents=True, exist_ok=True)
    try:
        files = files_of(client, dataset.sources)
        one_format([file.uri for file in files])
        rows = _read_files(files, directory)
    except NoFiles as problem:
        raise missing(str(problem), problem.hint) from None
    except NotFound:
        raise missing(f"the bucket of {dataset.title!r} does not exist", "correct the URI, or create it") from None
    except BadFile as problem:
        raise data_error(str(problem), *filter(None, [problem.hint])) from problem.__cause__
    if len(files) > 1:
        log(f"read {len(files)} files of {dataset.title}", stage="train", rows=len(rows))
    return rows, source_of(dataset, files)


def source_of(dataset: Dataset, files: Sequence[File]) -> Source:
    """The exact source: the generation and the checksum of each object."""
    revisions = {uri: f"generation {blob.generation} crc32c {blob.crc32c}" for uri, blob in files}
    if len(revisions) == 1 and dataset.sources == [*revisions]:
        return Source(uri=dataset.title, revision=revisions[dataset.title])
    digest = sha256(json.dumps(revisions).encode()).hexdigest()
    return Source(uri=dataset.title, revision=f"{len(revisions)} files sha256 {digest}", files=revisions)


def _download(file: File, path: Path) -> None:
    from google.api_core.exceptions import NotFound

    try:  # of the generation that was listed
        file.blob.download_to_filename(str(path), checksum="crc32c")
    except NotFound:
        raise NoFiles(f"the data set {file.uri!r} was deleted", "upload it again") from None


def _read_files(files: Sequence[File], directory: Path) -> RawRows:
    """The rows of all files, as one file. A line of JSON is judged when its row is read. Raises BadFile."""
    path, firsts, places = directory / "rows.jsonl", [], []
    columns: dict[str, str] = {}
    with path.open("wb") as lines, starts_of(path).open("wb") as starts:
        writer = _LineWriter(lines, starts)
        for file in files:
            name = f"{file.uri}: " if len(files) > 1 else ""
            firsts.append(writer.rows)
            places.append((writer.size, name))
            packed = directory / "file"
            _download(file, packed)
            suffix, compression = format_of(file.uri)
            try:
                if suffix in ARROW:
                    columns = _same_columns(table_columns(packed, suffix), columns, files[0].uri)
                    writer.rows_of(table_lines(packed, suffix))
                else:
                    with unpacked(packed, compression) as data:
                        _copy(data, suffix, writer)
            except BadFile as problem:
                raise BadFile(f"{name}{problem}", problem.hint) from problem.__cause__
            finally:
                packed.unlink()
        writer.flush()
    return RawRows(LineRows(path, tuple(places)), [file.uri for file in files], firsts)


def _same_columns(columns: dict[str, str], expected: dict[str, str], first: str) -> dict[str, str]:
    """Raises BadFile."""
    if expected and (other := sorted(dict(columns.items() ^ expected.items()))):
        raise BadFile(f"the file and {first} differ in the columns {shown_columns(other)}, or in their types")
    return columns


class _LineWriter:
    """Writes rows as lines, and the places of the rows."""

    def __init__(self, lines: BinaryIO, starts: BinaryIO) -> None:
        self._lines, self._file, self._starts = lines, starts, [0] * 0
        self.rows = self.size = 0

    def row(self, line: bytes) -> None:
        """Raises BadFile if the rows are more than MAX_BYTES."""
        self._starts.append(self.size)
        self.rows += 1
        self.blank(line)
        if len(self._starts) == STARTS_AT_ONCE:
            self.flush()

    def rows_of(self, lines: Iterable[str]) -> None:
        """Raises BadFile if the rows are more than MAX_BYTES."""
        for line in lines:
            self.row(line.encode() + b"\n")

    def blank(self, line: bytes) -> None:
        """Write a line that is no row, so that the numbers of lines stay right."""
        self.size += self._lines.write(line)
        if self.size > MAX_BYTES:
            raise BadFile(f"the rows have more than {MAX_BYTES} bytes when they are unpacked", "take fewer rows")

    def flush(self) -> None:
        np.asarray(self._starts, np.int64).tofile(self._file)
        self._starts.clear()


def _copy(data: BinaryIO, suffix: str, writer: _LineWriter) -> None:
    """Raises BadFile."""
    with text_of_file(data, suffix) as text:
        if suffix == ".jsonl":
            for line in text:
                (writer.row if line.strip() else writer.blank)(f"{line.rstrip(chr(10))}\n".encode())
            return
        writer.rows_of(map(json.dumps, text_rows(text, suffix)))


def from_hub(dataset: Dataset) -> tuple[RawRows, Source]:
    """The rows of a data set of the Hub, and its commit. `config` and `split` are those of datasets.load_dataset.

    Raises JobError.
    """
    import datasets
    from huggingface_hub import HfApi

    name = dataset.title
    try:
        commit = HfApi().dataset_info(name, revision=dataset.revision).sha or dataset.revision
        rows = datasets.load_dataset(name, dataset.config, split=dataset.split, revision=commit)
    except (datasets.exceptions.DatasetNotFoundError, datasets.exceptions.DataFilesNotFoundError) as error:
        raise missing(f"the data set {name!r}: {error}", "check the id, or add HF_TOKEN to `secrets`") from None
    except datasets.exceptions.DatasetGenerationError as error:
        raise data_error(f"the data set {name!r} cannot be read: {place_of(error)}") from error
    except ValueError as error:
        known = re.match(r"(Unknown split|BuilderConfig).*", str(error))  # other texts may quote a row
        raise data_error(f"the data set {name!r}: {known[0] if known else place_of(error)}") from error
    return RawRows(rows), Source(uri=name, revision=commit)
