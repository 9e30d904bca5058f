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

from dropforge.base.errors import DropforgeError

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

    Raises DropforgeError for a malformed entry of DROPFORGE_PLATFORMS, for a module that is not a platform, and for a
    platform whose classes lack a member.
    """
    return tuple(_load(name, module) for name, module in {**PLATFORMS, **_added()}.items())


def module_of(name: str) -> str:
    """The module of a platform. Raises KeyError for an unknown name."""
    return {**PLATFORMS, **_added()}[name]


def classes(part: str) -> tuple[type[Any], ...]:
    """The spec classes for a part of a spec: "target" or "serve"."""
    if part == "target":
        return tuple(platform.training.spec for platform in platforms() if platform.training)
    return tuple(serving.spec for platform in platforms() for serving in platform.serving)


def _load(name: str, module: str) -> Platform:
    try:
        platform: Platform = import_module(module).PLATFORM
    except (ImportError, AttributeError) as error:
        expected = f"expected a module with a PLATFORM; see {VARIABLE} and CONTRIBUTING.md"
        raise DropforgeError(f"platform {name!r}: the module {module!r} cannot be used: {error}; {expected}") from error
    for part in platform.parts:
        if lacking := part.spec.missing_members():
            where = f"platform {name!r}: {part.spec.__module__}.{part.spec.__name__}"
            raise DropforgeError(f"{where} lacks {', '.join(lacking)}; expected what spec/job_spec.py requires of it")
    return platform


def _added() -> dict[str, str]:
    """The platforms that the environment adds: module by name."""
    entries = [entry.strip() for entry in os.environ.get(VARIABLE, "").split(",") if entry.strip()]
    added = {}
    for entry in entries:
        name, separator, module = entry.partition("=")
        if not separator or not name or not module:
            raise DropforgeError(f"{VARIABLE} has the entry {entry!r}; expected name=module")
        added[name] = module
    return added
