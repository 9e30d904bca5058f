"""Volumes as directories: emptyDir, Secret, ConfigMap, and the disks of ephemeral volumes.

Other volumes keep the pod waiting, as a failed mount does.
"""

from __future__ import annotations

import os
from pathlib import Path

from ....containers.mounts import SHARED_MEMORY
from ...compute.disks import Disks
from ..controllers.volumes import claim_of, disk_of
from ..kinds import CONFIG_MAP, SECRET
from ..store import Object, Store
from .environment import ConfigError, read_data


class MountError(Exception):
    """A volume cannot be mounted: Kubernetes shows it as FailedMount."""


def mount(store: Store, pod: Object, directory: Path, disks: Disks) -> None:
    """Create the pod's volumes below `directory`. Idempotent. Raises MountError."""
    for volume in pod["spec"].get("volumes", ()):
        path = directory / volume["name"]
        if "emptyDir" in volume:
            path.mkdir(parents=True, exist_ok=True)
            continue
        if "ephemeral" in volume:
            _link_disk(store, pod, volume["name"], path, disks)
            continue
        kind, reference, field = (
            (SECRET, volume["secret"], "secretName")
            if "secret" in volume
            else (CONFIG_MAP, volume.get("configMap"), "name")
        )
        if reference is None:
            source = next(key for key in volume if key != "name")
            driver = f" of {volume['csi']['driver']}" if source == "csi" else ""
            raise MountError(
                f'MountVolume.SetUp failed for volume "{volume["name"]}": {source}{driver} volumes are not emulated by '
                "the local stack"
            )
        try:
            namespace, optional = pod["metadata"]["namespace"], bool(reference.get("optional"))
            data = read_data(store, kind, namespace, reference[field], optional=optional)
            _write_files(path, reference, data, optional)
        except ConfigError as error:
            raise MountError(f'MountVolume.SetUp failed for volume "{volume["name"]}": {error}') from error


def _link_disk(store: Store, pod: Object, volume: str, path: Path, disks: Disks) -> None:
    """Make `path` a link to the files of the disk that the scheduler has bound to the volume's claim."""
    claim = claim_of(store, pod, f"{pod['metadata']['name']}-{volume}")
    if claim is None or claim["status"]["phase"] != "Bound":
        raise MountError(f'MountVolume.SetUp failed for volume "{volume}": its claim does not exist or is not bound')
    files = disks.content(disk_of(store, claim)) / "files"
    files.mkdir(exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink():
        path.symlink_to(files)


def mount_points(pod: Object, container: Object, directory: Path) -> dict[str, Path]:
    """This machine's directories by the container's mount paths."""
    points = {}
    for mount_entry in container.get("volumeMounts", ()):
        path = "/" + mount_entry["mountPath"].strip("/")
        target = directory / mount_entry["name"] / mount_entry.get("subPath", "")
        if mount_entry.get("subPath") and not target.exists():
            target.mkdir(parents=True)
        points[path] = Path(SHARED_MEMORY) if path == SHARED_MEMORY else target
    return points


def _write_files(path: Path, reference: Object, data: dict[str, bytes], optional: bool) -> None:
    items = reference.get("items")
    names = {key: key for key in data} if items is None else {item["key"]: item["path"] for item in items}
    path.mkdir(parents=True, exist_ok=True)
    for key, name in names.items():
        if key not in data:
            if optional:
                continue
            raise ConfigError(f"references non-existent key: {key}")
        if name.startswith("/") or ".." in name.split("/"):
            raise ConfigError(f"path {name!r} must be relative and without '..'")
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "wb", opener=lambda target, flags: os.open(target, flags, 0o600)) as output:
            output.write(data[key])
