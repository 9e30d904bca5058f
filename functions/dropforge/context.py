"""What one call of a stage works with: the cloud, the runs bucket and the platforms."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property

from .base.allowance import Allowance
from .base.log import Log
from .base.once import Once
from .base.settings import Settings
from .cloud.context import Cloud
from .endpoints.store import EndpointStore
from .platforms.lookup import Platforms
from .run.store import RunStore

IGNORED_AN_HOUR = 30


@dataclass(frozen=True)
class Context:
    """Everything a stage needs beside its arguments. A process makes one, on its first call, and keeps it.

    `published` are the ids of run events that this process has published; `ignored` bounds its answers to uploads of
    objects that are no spec.
    """

    cloud: Cloud
    platforms: Platforms = field(default_factory=Platforms)
    published: Once = field(default_factory=Once)
    ignored: Allowance = field(default_factory=lambda: Allowance(IGNORED_AN_HOUR))

    @classmethod
    def from_environment(cls) -> Context:
        """The context of the deployment that this process's environment names. Raises DropforgeError."""
        return cls(Cloud.from_environment())

    @property
    def settings(self) -> Settings:
        return self.cloud.settings

    @property
    def log(self) -> Log:
        return self.cloud.log

    @cached_property
    def store(self) -> RunStore:
        """The runs bucket."""
        cloud = self.cloud
        return RunStore(cloud.clients.storage(), cloud.settings.runs_bucket, cloud.clock, cloud.chance)

    @cached_property
    def endpoints(self) -> EndpointStore:
        """The records of named endpoints."""
        return EndpointStore(self.store, self.cloud.clock)

    def now(self) -> datetime:
        """The time of day, in UTC."""
        return self.cloud.clock.now()


def process_context() -> Context:
    """The context of this process, made on the first call. Raises DropforgeError if a setting is missing.

    In the cloud, each function has a process. The local stack serves all functions from one process, where
    functions-framework executes main.py once for each of them: they share this context, and so the clients and what the
    store remembers.
    """
    return _context_of(tuple(sorted(item for item in os.environ.items() if _is_setting(item[0]))))


@cache
def _context_of(environment: tuple[tuple[str, str], ...]) -> Context:
    """One context for each set of settings: a test changes them within its process."""
    return Context.from_environment()


def _is_setting(variable: str) -> bool:
    return variable.startswith("DROPFORGE_") or variable.endswith("_EMULATOR_HOST")
