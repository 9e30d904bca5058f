"""Ephemeral disks: volumes `emptyDir` of medium DISK, as directories on this machine.

https://docs.cloud.google.com/run/docs/configuring/jobs/ephemeral-disk
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...containers.processes import temporary_directory
from ..kit.routing import Call

DISK = 2  # google-cloud-run 0.16.2 has no name for the medium, so the emulator keeps it as a number
_DISK_BY_NAME = re.compile(rb'("medium"\s*:\s*)"DISK"')


def with_known_media(call: Call) -> Call:
    """The request with the number instead of the name DISK, which the client's enum lacks."""
    return replace(call, body=_DISK_BY_NAME.sub(rb"\g<1>%d" % DISK, call.body))


def is_disk(volume: Any) -> bool:
    """Whether a volume is an ephemeral disk. Its class would warn about the number of the medium."""
    return bool(type(volume).pb(volume).empty_dir.medium == DISK)


def mount_points(container: Any, directory: Path) -> dict[str, Path]:
    """Make a directory for each volume of a container, by mount path.

    They are among the container's temporary files: a program may make one its TMPDIR, whose path must be short.
    """
    points = {}
    for mount in container.volume_mounts:
        point = temporary_directory(directory) / "volumes" / mount.name
        point.mkdir(parents=True, exist_ok=True)
        points[mount.mount_path.rstrip("/")] = point
    return points
