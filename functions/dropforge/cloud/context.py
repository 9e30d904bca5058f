"""The way to the Google APIs of one deployment, made once at the entry point and passed to every function."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from random import Random

from dropforge.base.clock import Clock
from dropforge.base.log import Log, log, traced
from dropforge.base.once import Once
from dropforge.base.settings import Settings
from dropforge.base.threads import Threads

from .clients import Clients


@dataclass(frozen=True)
class Cloud:
    """Settings and clients of one deployment, with the clock, the threads, the chance and the log of this process.

    `logged` are messages that this process logs only once.
    """

    settings: Settings
    clients: Clients
    clock: Clock = field(default_factory=Clock)
    threads: Threads = field(default_factory=Threads)
    chance: Random = field(default_factory=Random)
    log: Log = log
    logged: Once = field(default_factory=Once)

    @classmethod
    def from_environment(cls) -> Cloud:
        """The cloud that this process's environment names. Raises DropforgeError if a setting is missing."""
        settings = Settings.from_environment(os.environ)
        return cls(settings, Clients(), log=traced(settings.project))
