"""The rows of a whole file of text, one after another. Only a JSON list is in memory, as text."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterable, Iterator

from .files import BadFile, Raw, csv_rows, json_lines, null
from .values import kind_of

SUFFIXES = (".csv", ".jsonl", ".json")
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def text_rows(name: str, file: Iterable[bytes]) -> Iterator[Raw]:
    """The rows of the lines of a file whose name ends in one of SUFFIXES. Raises BadFile."""
    lines = text_lines(file)
    if name.endswith(".csv"):
        yield from csv_rows(lines)
        return
    first = ""
    for first in lines:
        if first.strip():
            break
    rest = _chained(first, lines)
    yield from _list("".join(rest)) if first.lstrip().startswith("[") else json_lines(rest)


def text_lines(lines: Iterable[bytes]) -> Iterator[str]:
    """The lines of a UTF-8 file, without its byte order mark. Raises BadFile, which names the line."""
    for number, line in enumerate(lines, start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(line, number, error) from None
        if "\r" in text:  # a carriage return alone ends a line, too
            yield from io.StringIO(text, newline="")
        else:
            yield text


def _not_utf8(line: bytes, number: int, error: UnicodeDecodeError) -> BadFile:
    encoding = "UTF-16" if number == 1 and line.startswith(_UTF16) else "WINDOWS-1252"
    return BadFile(
        f"line {number} of the data set is not UTF-8 text: byte 0x{line[error.start]:02x} at byte {error.start} of it",
        f"save it in UTF-8, such as with `iconv -f {encoding} -t UTF-8`, if {encoding} is its encoding",
    )


def _chained(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _list(text: str) -> Iterator[Raw]:
    decoder, at, number = json.JSONDecoder(parse_constant=null), text.index("[") + 1, 0
    while True:
        at = _after_space(text, at)
        if text.startswith("]", at):
            break
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise BadFile(f"row {number} of the data set is not JSON: {error.msg} at character {error.pos}") from None
        except (ValueError, RecursionError) as error:
            raise BadFile(f"row {number} of the data set cannot be read: {type(error).__name__}") from None
        if not isinstance(row, dict):
            raise BadFile(f"row {number} of the data set is {kind_of(row)}; expected an object")
        yield row
        number, at = number + 1, _after_space(text, at)
        if not text.startswith((",", "]"), at):
            raise BadFile(f"the data set is not JSON: expected a comma after row {number - 1}, at character {at}")
        at += text.startswith(",", at)


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1] in tuple(" \t\r\n"):
        at += 1
    return at
