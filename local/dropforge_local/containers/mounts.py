"""Volumes of containers that are not isolated, linked into their files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

SHARED_MEMORY = "/dev/shm"  # the machine's own serves every container


def link(rootfs: Path, points: Mapping[str, Path]) -> None:
    """Link the volumes to their paths inside a container's files."""
    for path, target in points.items():
        if path == SHARED_MEMORY:
            continue
        place = rootfs / path[1:]
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)  # a mount hides the image's files at its path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(target)
