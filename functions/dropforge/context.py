"""What one call of a stage works with: the cloud, the runs bucket and the platforms."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from .base.log import Log
from .base.once import Once
from .base.settings import Settings
from .cloud.context import Cloud
from .platforms.lookup import Platforms
from .run.store import RunStore


@dataclass(frozen=True)
class Context:
    """Everything a stage needs beside its arguments. A process makes one, on its first call, and keeps it.

    `published` are the ids of run events that this process has published.
    """

    cloud: Cloud
    platforms: Platforms = field(default_factory=Platforms)
    published: Once = field(default_factory=Once)

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

    def now(self) -> datetime:
        """The time of day, in UTC."""
        return self.cloud.clock.now()
