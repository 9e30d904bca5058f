"""Processes that end with the process that starts them."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent() -> Callable[[], None] | None:
    """The `preexec_fn` by which the kernel kills a new process with its parent; None where the kernel has none."""
    return _set_death_signal if sys.platform == "linux" else None


def _set_death_signal() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
