"""Files that PyArrow opens: compressed text, Parquet and Arrow. It is imported here: deployed functions lack it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, cast

from .files import BadFile, check_names

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # PyArrow's names
BATCH_ROWS = 256
FILE_MAGIC = b"ARROW1"  # (https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format)
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # (https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format)
READ_AHEAD = 1 << 20  # bytes of each column of a Parquet file: a group of rows may have the whole file


@contextmanager
def unpacked(path: Path, compression: str) -> Iterator[BinaryIO]:
    """The bytes of a file. Raises BadFile if a compressed one is damaged."""
    import pyarrow

    if not compression:
        with path.open("rb") as file:
            yield file
        return
    with (
        _whole(compression, "compress the file again"),
        pyarrow.OSFile(str(path)) as packed,
        pyarrow.CompressedInputStream(packed, COMPRESSIONS[compression]) as file,
    ):
        yield cast(BinaryIO, file)


def table_columns(path: Path, suffix: str) -> dict[str, str]:
    """The names of the columns of a Parquet or Arrow file, and their types. Raises BadFile."""
    with _table(path, suffix) as (schema, _):
        return {field.name: str(field.type) for field in schema}


def table_lines(path: Path, suffix: str) -> Iterator[str]:
    """The rows of a Parquet file, or of an Arrow file of either kind (stream and file), as JSON. Raises BadFile."""
    with _table(path, suffix) as (_, batches):
        for batch in batches:
            for row in batch.to_pylist():
                yield json.dumps(row, default=_as_json)


@contextmanager
def _table(path: Path, suffix: str) -> Iterator[tuple[Any, Iterator[Any]]]:
    from pyarrow import OSFile, ipc, parquet

    with _whole(suffix, "write the file again"):
        if suffix == ".parquet":
            with parquet.ParquetFile(path, buffer_size=READ_AHEAD, pre_buffer=False) as table:
                check_names(table.schema_arrow.names)
                yield table.schema_arrow, table.iter_batches(BATCH_ROWS)
            return
        with OSFile(str(path)) as file:
            is_stream = file.read(len(FILE_MAGIC)) != FILE_MAGIC
            file.seek(max(0, file.size() - len(STREAM_END)))
            is_cut = is_stream and file.read() != STREAM_END
            file.seek(0)
            opened = (ipc.open_stream if is_stream else ipc.open_file)(file)
            if is_cut:  # PyArrow takes the end of the file for the end of the stream
                raise BadFile(
                    "the data set is not a complete .arrow file: its stream has no end", "write the file again"
                )
            check_names(opened.schema.names)
            batches = opened if is_stream else map(opened.get_batch, range(opened.num_record_batches))
            yield opened.schema, iter(batches)


@contextmanager
def _whole(end: str, hint: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of this machine, such as a full disk
            raise
        raise BadFile(f"the data set is not a complete {end} file ({type(error).__name__})", hint) from error


def _as_json(value: Any) -> Any:
    """A value of a type that JSON lacks: dates, decimals, and bytes of UTF-8 (texts of some writers) as their text."""
    if isinstance(value, date | time | Decimal):
        return str(value)
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
    return {"type": type(value).__name__}  # such as an image's bytes: an object is no text
