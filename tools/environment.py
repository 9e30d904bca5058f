"""Provide a virtual environment below build/: create it unless it exists and matches its locks."""

from __future__ import annotations

import fcntl
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPOSSIBLE = 3


def provide(target: str, locks: Sequence[Path], create: Callable[[Path], str]) -> int:
    """Print the path of the environment's interpreter and return 0; on a problem, print it and return IMPOSSIBLE.

    `create` makes the environment in a directory, and returns why it cannot, or "".
    """
    directory = ROOT / target
    directory.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()
    with Path(f"{directory}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several processes may need the environment at once
        stamp = directory / ".installed"
        if not (stamp.exists() and stamp.read_text() == digest):
            began = time.monotonic()
            if problem := create(directory):
                print(problem, file=sys.stderr)
                return IMPOSSIBLE
            stamp.write_text(digest)
            print(f"created in {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(directory / "bin" / "python")
    return 0
