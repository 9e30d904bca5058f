"""The declaration of a platform: what the rest of dropforge asks about it."""

from __future__ import annotations

from dataclasses import dataclass

from dropforge.spec.kinds import ServeSpec, TargetSpec


@dataclass(frozen=True)
class Platform:
    """Everything that others read about one platform. Its modules that call Google APIs are imported on use."""

    name: str
    target: type[TargetSpec] | None = None
    serves: tuple[type[ServeSpec], ...] = ()
