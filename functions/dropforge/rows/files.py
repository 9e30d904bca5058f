"""The rows of files of text: JSON lines, a JSON list, CSV, TSV. Errors name the line, and never quote a row.

Files are read as streams: no more of a file than a row and a block is in memory.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, BinaryIO, TextIO

from dropforge.spec.templates import MAX_CSV_FIELD, shown_columns

from .values import kind_of

Raw = Mapping[str, Any]

BLOCK = 1 << 20  # characters that a JSON list is read by
MAX_ROW = 64 << 20  # characters of an object of a JSON list
SEPARATORS = {".csv": ",", ".tsv": "\t"}
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class BadFile(ValueError):
    """A file that cannot be read as rows. `hint` says how to correct it; it may be ""."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UnfinishedFile(BadFile):
    """A file that ends inside of a row."""


@contextmanager
def text_of_file(file: BinaryIO, suffix: str) -> Iterator[TextIO]:
    """The text of a file of this format, which is closed with it. Raises BadFile for what is no UTF-8."""
    lines = _Lines(file)
    newline = "" if suffix in SEPARATORS else None  # CSV has line breaks inside of fields
    with io.TextIOWrapper(lines, encoding="utf-8-sig", newline=newline) as text:  # type: ignore[type-var]
        try:
            yield text
        except UnicodeDecodeError as error:
            raise lines.not_utf8(error) from None


class _Lines(io.BufferedIOBase):
    """Bytes of a file, and the place where they are, for a message."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._block = file, b""
        self._lines, self._column = 1, 0  # of the first byte of the block

    def readable(self) -> bool:
        return True

    def read1(self, size: int = -1) -> bytes:
        self._lines, self._column = self._place(self._block)
        self._block = self._file.read1(size)  # type: ignore[attr-defined]  # of every file that is read here
        return self._block

    def close(self) -> None:
        self._file.close()
        super().close()

    def not_utf8(self, error: UnicodeDecodeError) -> BadFile:
        kept = max(0, len(error.object) - len(self._block))  # the beginning of a character, from the block before
        line, column = self._place(self._block[: max(0, error.start - kept)])
        found = error.object[error.start]
        encoding = "UTF-16" if line == 1 and error.object.startswith(_UTF16) else "WINDOWS-1252"
        return BadFile(
            f"line {line} of the data set is not UTF-8 text: byte 0x{found:02x} at byte {column} of it",
            f"save it in UTF-8, such as with `iconv -f {encoding} -t UTF-8`, if {encoding} is its encoding",
        )

    def _place(self, read: bytes) -> tuple[int, int]:
        """The line and the byte in it after these bytes of the block."""
        lines = read.count(b"\n")
        return self._lines + lines, len(read) - read.rfind(b"\n") - 1 if lines else self._column + len(read)


def text_rows(text: TextIO, suffix: str) -> Iterator[Raw]:
    """The rows of a file of text, by the suffix of its format. Raises BadFile."""
    if suffix in SEPARATORS:
        return csv_rows(text, SEPARATORS[suffix])
    return json_rows(text) if suffix == ".json" else json_lines(text)


def json_rows(text: TextIO) -> Iterator[Raw]:
    """The rows of a JSON list, or of JSON lines: the wrong suffix is common. Raises BadFile."""
    head = text.read(BLOCK)
    if head.lstrip().startswith("["):
        return json_list(text, head.lstrip()[1:])
    *lines, last = head.split("\n")
    return json_lines(chain(lines, [last + text.readline()], text))


def json_list(text: TextIO, begun: str = "") -> Iterator[Raw]:
    """The objects of a JSON list, of which the bracket and `begun` are read already. Raises BadFile."""
    decoder, left, at, number, commas, size = json.JSONDecoder(parse_constant=null), begun, 0, 0, 0, BLOCK
    while True:
        while (character := left[at : at + 1]) and character in ", \t\r\n":
            commas, at = commas + (character == ","), at + 1
        if character == "]" and not commas:
            if (left[at + 1 :] + text.read(BLOCK)).strip():
                raise BadFile("the data set has text after its list")
            return
        try:
            row, at = decoder.raw_decode(left, at)
        except json.JSONDecodeError as error:
            more = "" if len(left) - at > MAX_ROW else text.read(size)
            if not more:
                raise UnfinishedFile(f"row {number} of the data set is not JSON: {error.msg}") from None
            left, at = left[at:] + more, 0
            size = max(BLOCK, len(left))
            continue
        except (ValueError, RecursionError) as error:  # as in json_row
            raise BadFile(f"row {number} of the data set cannot be read: {type(error).__name__}") from None
        if not isinstance(row, dict):
            raise BadFile(f"row {number} of the data set is {kind_of(row)}; expected a list of objects")
        if commas != (number > 0):
            raise BadFile(f"row {number} of the data set follows {commas} commas; expected one between two rows")
        yield row
        number, commas, size = number + 1, 0, BLOCK


def json_lines(lines: Iterable[str]) -> Iterator[Raw]:
    """Raises BadFile."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield json_row(line, f"line {number}")


def json_row(text: str, where: str) -> Raw:
    """The object of a text. Raises BadFile."""
    try:
        row = _parse(text)
    except json.JSONDecodeError as error:
        raise BadFile(f"{where} of the data set is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        raise BadFile(f"{where} of the data set cannot be read: {type(error).__name__}") from None
    if not isinstance(row, dict):
        raise BadFile(f"{where} of the data set is {kind_of(row)}; expected an object")
    return row


def null(constant: str) -> None:
    """NaN and infinities, which are not JSON: pandas writes NaN where a value is missing."""


_parse = json.JSONDecoder(parse_constant=null).decode


def csv_rows(lines: Iterable[str], separator: str = ",") -> Iterator[Raw]:
    """Rows of separated fields; the first line has the names. Raises BadFile."""
    csv.field_size_limit(MAX_CSV_FIELD)
    reader = csv.DictReader(lines, strict=True, delimiter=separator)
    try:
        check_names(reader.fieldnames or ())
        for row in reader:
            yield _whole_row(row, reader, separator)
    except csv.Error as error:
        if str(error).startswith("field larger"):
            raise BadFile(
                f"line {reader.line_num + 1} of the data set has a field of more than {MAX_CSV_FIELD} characters",
                "look for a quote that is not closed, or split the text into several rows",
            ) from None
        kind = UnfinishedFile if "unexpected end of data" in str(error) else BadFile
        raise kind(f"the data set is not {'CSV' if separator == ',' else 'TSV'}: {error}") from None


def check_names(names: Sequence[str]) -> None:
    """Raises BadFile if two columns have one name: a row would have only one of them."""
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise BadFile(f"the data set has two columns of the same name: {shown_columns(twice)}", "rename one of them")


def _whole_row(row: dict[Any, Any], reader: csv.DictReader[str], separator: str) -> Raw:
    """The row, if it is as long as the header: otherwise its values would be in other columns."""
    names = len(reader.fieldnames or ())
    surplus, lacking = len(row.get(None) or ()), sum(value is None for value in row.values())
    if surplus or lacking:
        raise BadFile(
            f"line {reader.line_num} of the data set has {names + surplus - lacking} fields; the header has {names} "
            "columns",
            f"put a field that has a {'comma' if separator == ',' else 'tab'} in quotes",
        )
    return row
