"""What Compute Engine refuses in a disk, and the fields that it fills in."""

from __future__ import annotations

from typing import Any

from dropforge_local.base.errors import ApiError

from ..kit.names import ID, ZONE, invalid_label
from .wire import LINK, timestamp

FIELDS = frozenset(("name", "description", "sizeGb", "type", "labels", "zone", "kind"))
# Smallest and largest size in GB: https://cloud.google.com/compute/docs/disks
SIZES = {
    "pd-standard": (10, 65536),
    "pd-balanced": (10, 65536),
    "pd-ssd": (10, 65536),
    "hyperdisk-balanced": (4, 65536),
}
DEFAULT_TYPE, DEFAULT_GB = "pd-standard", 500


def make_disk(body: dict[str, Any], parent: str, disk_id: int, now: float) -> dict[str, Any]:
    """A new disk as Compute Engine shows it. Raises INVALID_ARGUMENT for a disk that Compute Engine would refuse."""
    if unknown := sorted(set(body) - FIELDS):
        raise ApiError("UNIMPLEMENTED", f"the local stack's disks have no {unknown!r}; they have {sorted(FIELDS)!r}")
    name = body.get("name", "")
    if not isinstance(name, str) or not ID.fullmatch(name):
        raise _refuse("resource.name", name, f"Must be a match of regex '{ID.pattern}'")
    disk_type = _checked_type(str(body.get("type", DEFAULT_TYPE)), parent.rsplit("/", 1)[1])
    size, (smallest, largest) = str(body.get("sizeGb", DEFAULT_GB)), SIZES[disk_type]
    if not size.isdecimal() or not smallest <= int(size) <= largest:
        raise _refuse("resource.sizeGb", size, f"Expected {smallest} to {largest}")
    _check_labels(body.get("labels", {}))
    return {
        **body,
        "kind": "compute#disk",
        "id": str(disk_id),
        "sizeGb": size,
        "type": f"{LINK}/{parent}/diskTypes/{disk_type}",
        "zone": f"{LINK}/{parent}",
        "selfLink": f"{LINK}/{parent}/disks/{name}",
        "status": "CREATING",
        "creationTimestamp": timestamp(now),
        "physicalBlockSizeBytes": "4096",
    }


def check_zone(parent: str) -> None:
    zone = parent.rsplit("/", 1)[1]
    if not ZONE.fullmatch(zone):
        raise _refuse("zone", zone, "Unknown zone.")


def in_use(name: str, user: str) -> ApiError:
    message = f"The disk resource '{name}' is already being used by '{user}'"
    return ApiError("FAILED_PRECONDITION", message)


def _checked_type(text: str, zone: str) -> str:
    """The name of a disk type, from its name or its URL in the disk's zone."""
    name = text.rsplit("/", 1)[-1] if text.endswith(f"zones/{zone}/diskTypes/{text.rsplit('/', 1)[-1]}") else text
    if name not in SIZES:
        raise _refuse("resource.type", text, f"Expected zones/{zone}/diskTypes/ and one of {sorted(SIZES)!r}")
    return name


def _check_labels(labels: Any) -> None:
    if not isinstance(labels, dict):
        raise _refuse("resource.labels", labels, "Expected an object")
    if wrong := invalid_label(labels):
        raise _refuse(f"resource.labels.{wrong[0]}", wrong[1], "Expected lowercase letters, numbers, '-' and '_'")


def _refuse(field: str, value: Any, expected: str) -> ApiError:
    return ApiError("INVALID_ARGUMENT", f"Invalid value for field '{field}': {value!r}. {expected}")
