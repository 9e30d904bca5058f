"""Executes a command whose terminal is its standard input: `python terminal.py PROGRAM ARGUMENT…`, in a new session.

A program of its own, because between fork and exec a process with threads may run no Python.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios


def main() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C reaches the command. Does not return."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
