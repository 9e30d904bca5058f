"""The platforms, by the name of their folder. A new platform is one line here; everything else is in its folder.

A platform is imported when it is first needed, by its name: the packages below `platforms` never import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dropforge.platforms.platform import Platform

PLATFORMS = {
    "cloud_run": "dropforge.platforms.cloud_run",
    "gke": "dropforge.platforms.gke",
    "ray": "dropforge.platforms.ray",
    "tpu_vm": "dropforge.platforms.tpu_vm",
}


def platforms() -> Iterator[Platform]:
    """Every platform's declaration, in the order of the registry."""
    for module in PLATFORMS.values():
        yield import_module(module).PLATFORM


def classes(part: str) -> tuple[type[Any], ...]:
    """The spec classes for one part of a spec: "target" or "serve"."""
    if part == "target":
        return tuple(platform.target for platform in platforms() if platform.target)
    return tuple(serve for platform in platforms() for serve in platform.serves)
