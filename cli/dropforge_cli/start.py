"""The `dropforge` program: what holds before the command line is imported.

Ctrl-C ends it with 130 at any moment. Standard streams may be closed, or may know ASCII only.
"""

from __future__ import annotations

import os
import signal
import sys

from . import INTERRUPTED


def main() -> None:
    """Run the command line."""
    quit_on_interrupt()
    if message := _repair_streams():
        from .plain import echo

        echo(f"error: {message}", err=True)
        raise SystemExit(1)
    from .main import cli

    cli()


def quit_on_interrupt() -> None:
    """Let Ctrl-C end the program at once, without a word. A program that ignores Ctrl-C goes on ignoring it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def _repair_streams() -> str:
    """Open the streams that the shell closed, and spell text that they cannot encode. Return what cannot be mended."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        return "the standard output is closed; expected a terminal, a file or a pipe"
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    return ""
