"""How things look: the console, and numbers, durations and money as people read them."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 240  # what is read by programs or files is not wrapped at 80


def stdout() -> Console:
    """A console on standard output, as it is at this moment."""
    return _console(sys.stdout)


def stderr() -> Console:
    """A console for what must not mix with the result."""
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    # Without markup: what is shown comes from specs and clouds, and `[:90%]` is a split, not a style.
    width = None if file.isatty() else PIPE_WIDTH
    return Console(file=file, width=width, markup=False, highlight=False, emoji=False)


def titled(title: str, text: str = "") -> Text:
    """A line that begins with something bold."""
    return Text.assemble((title, "bold"), f"  {text}" if text else "")


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A plain table; the columns in `right` hold numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def duration(seconds: float) -> str:
    """`5025` as "1 h 24 min", `12.34` as "12.3 s"."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24) if hours >= 48 else (0, hours)
    parts = [f"{count} {unit}" for count, unit in ((days, "d"), (hours, "h"), (minutes, "min")) if count]
    return " ".join(parts)


def usd(amount: float | None) -> str:
    """Money with as many digits as it needs; "unknown" is never shown as 0."""
    if amount is None:
        return "unknown"
    return f"${amount:.2f}" if amount >= 1 or amount == 0 else f"${amount:.4f}"


def number(value: float | None) -> str:
    """A metric: whole numbers as such, others with four digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if (value == round(value) and abs(value) >= 1) or abs(value) >= 10_000 else f"{value:.4g}"
