"""The surroundings of an emulator that runs containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from ...containers.images import ImageStore


@dataclass(frozen=True)
class Host:
    """Where an emulator keeps its state and its containers.

    `directory` has the containers. `environment` maps a service account to the variables that the platform gives to
    its containers; by these, the containers find Google's APIs.
    """

    db: Database
    clock: Clock
    images: ImageStore
    directory: Path
    environment: Callable[[str], Mapping[str, str]]
