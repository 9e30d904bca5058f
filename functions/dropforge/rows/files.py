"""The rows of files of text: JSON lines, a JSON list, CSV. Errors name the line, and never quote a row."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dropforge.spec.templates import MAX_CSV_FIELD

from .values import kind_of

Raw = Mapping[str, Any]


class BadFile(ValueError):
    """A file that cannot be read as rows. `hint` says how to correct it; it may be ""."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def json_lines(lines: Iterable[str]) -> Iterator[Raw]:
    """Raises BadFile."""
    for number, line in enumerate(_decoded(lines), start=1):
        if line.strip():
            yield json_row(line, f"line {number}")


def json_row(text: str, where: str) -> Raw:
    """The object of a text. Raises BadFile."""
    try:
        row = json.loads(text, parse_constant=null)
    except json.JSONDecodeError as error:
        raise BadFile(f"{where} of the data set is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        raise BadFile(f"{where} of the data set cannot be read: {type(error).__name__}") from None
    if not isinstance(row, dict):
        raise BadFile(f"{where} of the data set is {kind_of(row)}; expected an object")
    return row


def null(constant: str) -> None:
    """NaN and infinities, which are not JSON: pandas writes NaN where a value is missing."""


def csv_rows(lines: Iterable[str]) -> Iterator[Raw]:
    """Rows of fields separated by commas; the first line has the names. Raises BadFile."""
    csv.field_size_limit(MAX_CSV_FIELD)
    reader = csv.DictReader(_decoded(lines), strict=True)
    try:
        for row in reader:
            yield _whole_row(row, reader)
    except csv.Error as error:
        if str(error).startswith("field larger"):
            raise BadFile(
                f"line {reader.line_num + 1} of the data set has a field of more than {MAX_CSV_FIELD} characters",
                "look for a quote that is not closed, or split the text into several rows",
            ) from None
        raise BadFile(f"the data set is not CSV: {error}") from None


def _whole_row(row: dict[Any, Any], reader: csv.DictReader[str]) -> Raw:
    """The row, if it is as long as the header: otherwise its values would be in other columns."""
    names = len(reader.fieldnames or ())
    surplus, lacking = len(row.get(None) or ()), sum(value is None for value in row.values())
    if surplus or lacking:
        raise BadFile(
            f"line {reader.line_num} of the data set has {names + surplus - lacking} fields; the header has {names} "
            "columns",
            "put a field that has a comma in quotes",
        )
    return row


def _decoded(lines: Iterable[str]) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise not_utf8(error) from None


def not_utf8(error: UnicodeDecodeError) -> BadFile:
    return BadFile(f"the data set is not UTF-8 text: {error.reason}", "save it in UTF-8 (iconv converts it)")
