"""The inside of an emulated machine: a root directory, disks, and shims for commands that a process cannot run.

The startup script sees the root directory as $DROPFORGE_ROOT. The root directory is the boot disk and survives reboots;
mounts and /run do not survive.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...containers import docker
from ...containers.images import ImageStore

# docker, mount, mkfs.ext4 and similar commands; first in the machine's PATH.
SHIMS = Path(__file__).with_name("shims")
INIT = Path(__file__).with_name("init.py")
DIRECTORIES = ("dev/disk/by-id", "etc", "mnt", "run", "tmp", "var/lib", "var/log")


def prepare(root: Path, disks: Sequence[Path], images: ImageStore, platform_env: Mapping[str, str]) -> None:
    """Prepare the root directory of a machine that boots; `disks` are the directories of its data disks."""
    for volatile in ("dev", "mnt", "run", "tmp"):
        shutil.rmtree(root / volatile, ignore_errors=True)
    for directory in DIRECTORIES:
        (root / directory).mkdir(parents=True, exist_ok=True)
    (root / "dev/sda").touch()  # the boot disk
    for index, content in enumerate(disks, start=1):
        device = f"sd{chr(ord('a') + index)}"
        (root / "dev" / device).symlink_to(content)
        # Compute Engine's name for a disk that a client attached without a name.
        (root / f"dev/disk/by-id/google-persistent-disk-{index}").symlink_to(f"../../{device}")
    docker.configure(root, images, platform_env)


def is_powered_off(root: Path) -> bool:
    """Whether an ended machine shut itself down (shims/shutdown)."""
    return (root / "run/powered-off").exists()
