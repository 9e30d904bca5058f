"""The terminal: consoles, tables and progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple, TextIO, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from .plain import PlainConsole, plain

PIPE_WIDTH = 240  # output for programs or files is not wrapped at 80
GAP = 2  # blank columns between two columns of a table
QUICK_SECONDS = 1.0  # shorter work shows no bar

T = TypeVar("T")


def stdout() -> Console:
    """Return a console on the current standard output."""
    return _console(sys.stdout)


def stderr() -> Console:
    """Return a console for messages that must not mix with the result."""
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    # Without markup: texts come from specs and clouds, where `[:90%]` is a split and not a style.
    width = None if file.isatty() else PIPE_WIDTH
    return PlainConsole(file=file, width=width, markup=False, highlight=False, emoji=False)


def working(text: str) -> AbstractContextManager[object]:
    """Show that the command works, while it does, on a terminal."""
    return stderr().status(text)


def awaited(items: Iterable[T], text: str) -> Iterator[T]:
    """Yield the items; show on a terminal that the command works until the first one is there."""
    rest = iter(items)
    with working(text):
        first = [*islice(rest, 1)]
    yield from first
    yield from rest


def counted(items: Iterable[T], total: int, text: str) -> Iterator[T]:
    """Yield the items; on a terminal, a bar appears after a second and shows how many of them there are so far."""
    out, began = stderr(), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Rich would send what is printed meanwhile to stderr, also if stdout is a file.
    redirects = sys.stdout.isatty()
    progress = Progress(*columns, console=out, transient=True, disable=not out.is_terminal, redirect_stdout=redirects)
    task = progress.add_task(text, total=total)
    try:
        for item in items:
            if time.monotonic() - began > QUICK_SECONDS:
                progress.start()
            progress.advance(task)
            yield item
    finally:
        progress.stop()


def titled(title: str, text: str = "") -> Text:
    """Return a line that begins with a bold title."""
    return Text.assemble((title, "bold"), f"  {text}" if text else "")


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return a plain table. The columns in `right` hold numbers."""
    rows = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column in columns:
        rows.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return rows


class Column(NamedTuple):
    """A column of a list. `rank` says which columns stay in a narrow terminal: the lowest."""

    rank: int
    title: str
    cell: Callable[[Any], str]
    is_number: bool = False


def fitting(rows: Sequence[Any], available: Sequence[Column], width: int) -> tuple[Table, list[Column]]:
    """Return a table with one line for each row, and its columns: those that fit into `width`. No text is cut."""
    cells = {column: [plain(column.cell(row)).replace("\n", " ") for row in rows] for column in available}
    kept: set[Column] = set()
    used = -GAP
    for column in sorted(available):
        needed = GAP + max(map(cell_len, [column.title, *cells[column]]))
        if not kept or used + needed <= width:
            kept.add(column)
            used += needed
    chosen = [column for column in available if column in kept]
    shown = table(*(c.title for c in chosen), right=tuple(c.title for c in chosen if c.is_number))
    for row in zip(*(cells[column] for column in chosen), strict=True):
        shown.add_row(*row)
    return shown, chosen


def joined(title: str, parts: Sequence[str], out: Console) -> str:
    """Return a title and the parts with commas between them. On a terminal, the lines split no part."""
    lines = [f"{title}{parts[0]}"]
    for part in parts[1:]:
        if not out.is_terminal or cell_len(lines[-1]) + cell_len(part) + len(", ,") <= out.width:
            lines[-1] += f", {part}"
        else:
            lines[-1] += ","
            lines.append(" " * cell_len(title) + part)
    return "\n".join(lines)
