"""Python imports this at its start below hide.py. It gives psutil what psutil has on macOS, and no more."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

SYSTEM = ("/bin", "/sbin", "/usr/bin", "/usr/sbin")


def environ_of_own_programs(process: psutil.Process) -> dict[str, str]:
    """As on macOS, where the kernel tells nobody the environments of Apple's own programs, such as /bin/sh."""
    program = Path(process.exe())
    restricted = str(program.parent) in SYSTEM and not program.name.startswith("python")
    return {} if restricted else environ(process)


if "HIDDEN_PROCFS" in os.environ:
    psutil.PROCFS_PATH = os.environ["HIDDEN_PROCFS"]
if "HIDDEN_ENVIRON" in os.environ:
    environ = psutil.Process.environ
    psutil.Process.environ = environ_of_own_programs  # type: ignore[method-assign,assignment]
