"""Text for a terminal: what a container, a spec or a cloud wrote must neither move the cursor nor set the clipboard.

Every command prints by `echo`, `echo_json` or a PlainConsole (tests/cli/test_plain.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 and C1 except tab and line feed, delete, and the characters that change the direction of text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """The text with its control characters spelled out, such as `\\x1b`; a carriage return begins a new line."""
    return _CONTROLS.sub(_spelled, text.replace("\r\n", "\n").replace("\r", "\n"))


def _spelled(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text without control characters."""
    click.echo(plain(text), err=err, nl=nl)


def echo_json(value: Any) -> None:
    """Print a value as JSON, in which control characters are escapes of JSON."""
    click.echo(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))  # the only one that json.dumps leaves


class PlainConsole(Console):
    """A console whose only control sequences are Rich's own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)
