"""The first rows of a data set, judged as the training will judge all rows: what is wrong is found before it costs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from difflib import get_close_matches

from dropforge.base.errors import SpecProblem
from dropforge.spec import Dataset
from dropforge.spec.parts import shown
from dropforge.spec.templates import columns_in, shown_columns

from .conversation import LeftOut
from .files import BadFile, Raw, csv_rows, json_lines, not_utf8, null
from .forms import Reader, columns_of, form_of, has_column
from .values import UnsupportedRow, UnusableRow

SAMPLE_BYTES = 1 << 18  # of an object
SUFFIXES = (".csv", ".jsonl", ".json")
SEPARATORS = (";", "\t", "|")
FEW_ROWS = 20  # fewer unusable rows say nothing about the others
MOST_UNUSABLE = 0.5  # of the sample; the training leaves out at most a tenth of all rows
SOURCE = "/dataset/source"


def sample_problems(dataset: Dataset, uri: str, data: bytes) -> list[SpecProblem]:
    """The faults in the first SAMPLE_BYTES of a data set. The training reads other formats than text."""
    if not uri.endswith(SUFFIXES):
        return []
    rows: list[Raw] = []
    try:
        for row in _rows(uri, data):
            rows.append(row)
    except BadFile as problem:
        return [
            SpecProblem(SOURCE, f"{uri}: {problem}", expected=problem.hint or "a file as docs/data-formats.md shows")
        ]
    return _problems(dataset, uri, rows) if rows else []


def separator_of(columns: list[str]) -> str | None:
    """The character that seems to separate the columns of a CSV file, if it is no comma."""
    return next((mark for mark in SEPARATORS if mark in columns[0]), None) if len(columns) == 1 else None


def _problems(dataset: Dataset, uri: str, rows: list[Raw]) -> list[SpecProblem]:
    columns = columns_of(rows)
    if mark := separator_of(columns):
        message = f"the columns of {uri} are separated by {mark!r}"
        return [SpecProblem(SOURCE, message, shown_columns(columns), "commas; save the file again")]
    if missing := _missing_columns(dataset, uri, columns):
        return missing
    try:
        reader = Reader(form_of(columns, dataset), dataset.ignore)
    except UnsupportedRow as problem:
        return [SpecProblem(SOURCE, f"{uri} has {problem}", expected=problem.hint)]
    unusable = []
    for number, row in enumerate(rows):
        try:
            reader(row)
        except LeftOut:
            continue
        except UnsupportedRow as problem:
            return [SpecProblem(SOURCE, f"row {number} of {uri} has {problem}", expected=problem.hint)]
        except UnusableRow as problem:
            unusable.append(f"row {number}: {problem}")
    if len(rows) >= FEW_ROWS and len(unusable) > MOST_UNUSABLE * len(rows):
        message = f"{len(unusable)} of the first {len(rows)} rows of {uri} cannot be trained on; {unusable[0]}"
        return [SpecProblem(SOURCE, message, expected="at most a tenth of such rows")]
    return []


def _missing_columns(dataset: Dataset, uri: str, columns: list[str]) -> list[SpecProblem]:
    """The columns that templates name and the data lacks, with the nearest name."""
    has = f"the columns of {uri}: {shown_columns(columns)}"
    problems = []
    for name, template in dataset.columns or ():
        for column in columns_in(template or ""):
            if not has_column(columns, column):
                close = get_close_matches(column, columns, n=1)
                meant = f"did you mean {close[0]!r}? " if close else ""
                message = f"the template names the column {column!r}, which the data lacks"
                problems.append(SpecProblem(f"/dataset/columns/{name}", message, shown(template), f"{meant}{has}"))
    return problems


def _rows(uri: str, data: bytes) -> Iterator[Raw]:
    """The whole rows of the beginning of a file. Raises BadFile."""
    is_cut = len(data) >= SAMPLE_BYTES
    text = _text(data, is_cut)
    if uri.endswith(".csv"):
        yield from _csv(text, is_cut)
    elif text.lstrip().startswith("["):
        yield from _list(text)
    else:
        lines = text.splitlines(keepends=True)
        yield from json_lines(lines[:-1] if is_cut else lines)


def _text(data: bytes, is_cut: bool) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if is_cut and error.start > len(data) - 4:  # the cut is inside a character
            return data[: error.start].decode("utf-8-sig")
        raise not_utf8(error) from None


def _csv(text: str, is_cut: bool) -> Iterator[Raw]:
    """Rows before the last line break; the last record may end in a later part of the file."""
    rows = csv_rows(io.StringIO(text, newline=""))
    before: Raw | None = None
    try:
        for row in rows:
            if before is not None:
                yield before
            before = row
    except BadFile:
        if not is_cut:
            raise
        return
    if before is not None and not is_cut:
        yield before


def _list(text: str) -> Iterator[Raw]:
    """The objects of a JSON list, up to the first that is not whole; the training names it if it is malformed."""
    decoder, at = json.JSONDecoder(parse_constant=null), text.index("[") + 1
    while True:
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,"))
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        if not isinstance(row, dict):
            return
        yield row
