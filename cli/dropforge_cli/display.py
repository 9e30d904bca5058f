"""The terminal: consoles, tables and progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TextIO, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from .plain import PlainConsole

PIPE_WIDTH = 240  # output for programs or files is not wrapped at 80
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


def counted(items: Iterable[T], total: int, text: str) -> Iterator[T]:
    """Yield the items; on a terminal, a bar appears after a second and shows how many of them there are so far."""
    out, began = stderr(), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, console=out, transient=True, disable=not out.is_terminal)
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
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        rows.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return rows


def joined(parts: Sequence[str], width: int) -> str:
    """Return the parts with commas between them, in lines of at most `width` columns that split no part."""
    lines = [parts[0]]
    for part in parts[1:]:
        if cell_len(lines[-1]) + cell_len(part) + len(", ,") <= width:
            lines[-1] += f", {part}"
        else:
            lines[-1] += ","
            lines.append(part)
    return "\n".join(lines)
