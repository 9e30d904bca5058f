"""A container's output: the files that its shim writes, for users to read and for the platform to append to."""

from __future__ import annotations

import time
from pathlib import Path

LOG = "output.log"
TIMES = "output.times"  # lines "TIME OFFSET": when the output reached this size


def read_output(directory: Path, tail: int | None = None) -> str:
    """The container's output, oldest line first; only the last `tail` lines when given. Missing files read as empty."""
    data = b"".join(_read(directory / name) for name in (f"{LOG}.1", LOG))
    return last_lines(data.decode("utf-8", errors="replace"), tail)


def last_lines(text: str, tail: int | None) -> str:
    if tail is None:
        return text
    return "".join(text.splitlines(keepends=True)[-tail:]) if tail > 0 else ""


def append_platform_line(directory: Path, message: str) -> None:
    """Append a line that Cloud Logging would show as a system line, such as the reason of a kill."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with open(directory / LOG, "a", encoding="utf-8") as file:
        file.write(f"[{stamp} platform] {message}\n")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
