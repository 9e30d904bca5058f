"""The platforms, by name. A new platform adds a line here; everything else is in the platform's folder.

A platform is imported when it is first needed, by the name of its module. So this package never imports a platform.
A platform outside of this repository is an entry of the environment variable DROPFORGE_PLATFORMS: `name=module`,
separated by commas.
"""

from __future__ import annotations

import os
from functools import cache
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
VARIABLE = "DROPFORGE_PLATFORMS"


@cache
def platforms() -> tuple[Platform, ...]:
    """The declaration of every platform, in the order of the registry.

    Raises ImportError for a module that cannot be imported, AttributeError for a module without PLATFORM.
    """
    return tuple(import_module(module).PLATFORM for module in {**PLATFORMS, **_added()}.values())


def module_of(name: str) -> str:
    """The module of a platform. Raises KeyError for an unknown name."""
    return {**PLATFORMS, **_added()}[name]


def classes(part: str) -> tuple[type[Any], ...]:
    """The spec classes for a part of a spec: "target" or "serve"."""
    if part == "target":
        return tuple(platform.training.spec for platform in platforms() if platform.training)
    return tuple(serving.spec for platform in platforms() for serving in platform.serving)


def _added() -> dict[str, str]:
    """The platforms that the environment adds: module by name."""
    entries = [entry.strip() for entry in os.environ.get(VARIABLE, "").split(",") if entry.strip()]
    added = {}
    for entry in entries:
        name, separator, module = entry.partition("=")
        if not separator or not name or not module:
            raise ImportError(f"{VARIABLE} has the entry {entry!r}; expected name=module")
        added[name] = module
    return added
