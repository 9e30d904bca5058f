"""The time and the threads of the machine that a container runs on. A simulation passes its own."""

from __future__ import annotations

from typing import NamedTuple

from dropforge.base.clock import Clock
from dropforge.base.threads import Threads


class Host(NamedTuple):
    """The clock and the threads of the machine on which an attempt runs."""

    clock: Clock = Clock()
    threads: Threads = Threads()


THIS_MACHINE = Host()
