"""Volumes of containers that are not isolated: linked into their files, and named by where they really are."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from .images import ABSOLUTE_PATH

SHARED_MEMORY = "/dev/shm"  # the machine's own serves every container


def map_paths(text: str, mounts: Mapping[str, str]) -> str:
    """Replace the paths that volumes are mounted at with where the volumes are."""
    longest_first = sorted(mounts.items(), key=lambda one: -len(one[0]))

    def real(path: str) -> str:
        for mount, directory in longest_first:
            if path == mount or path.startswith(f"{mount}/"):
                return directory + path[len(mount) :]
        return path

    return ABSOLUTE_PATH.sub(lambda match: real(match[0]), text)


def link(rootfs: Path, points: Mapping[str, Path]) -> None:
    """Show the volumes at their paths inside a container's files."""
    for path, target in points.items():
        if path == SHARED_MEMORY:
            continue
        place = rootfs / path[1:]
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)  # a mount hides what the image has there
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target)
