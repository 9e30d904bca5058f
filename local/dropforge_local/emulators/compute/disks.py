"""Zonal persistent disks: what Compute Engine refuses in one, and the table that they are kept in.

A disk's content is a directory: blank until mkfs has left the file `filesystem` there, beside `files/`.
"""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

SCHEMA = """
CREATE TABLE IF NOT EXISTS compute_disks (
  name TEXT PRIMARY KEY, parent TEXT NOT NULL, id INTEGER NOT NULL, user TEXT NOT NULL, body TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS compute_operations (
  name TEXT PRIMARY KEY, parent TEXT NOT NULL, request TEXT NOT NULL, target TEXT NOT NULL, created REAL NOT NULL,
  done INTEGER NOT NULL, body TEXT NOT NULL
);
"""
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
ZONE = re.compile(r"[a-z]+-[a-z]+\d+-[a-z]")
LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}")
LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}")
FIELDS = frozenset(("name", "description", "sizeGb", "type", "labels", "zone", "kind"))
# Smallest and largest size in GB: https://cloud.google.com/compute/docs/disks
SIZES = {
    "pd-standard": (10, 65536),
    "pd-balanced": (10, 65536),
    "pd-ssd": (10, 65536),
    "hyperdisk-balanced": (4, 65536),
}
DEFAULT_TYPE, DEFAULT_GB = "pd-standard", 500
LINK = "https://www.googleapis.com/compute/v1"


class Disks:
    """Disks by full name (projects/P/zones/Z/disks/D), with their content below `directory`."""

    def __init__(self, db: Database, directory: Path) -> None:
        self.db = db
        self._directory = directory.resolve()
        db.connection.executescript(SCHEMA)

    def find(self, name: str) -> dict[str, Any] | None:
        row = self.db.connection.execute("SELECT * FROM compute_disks WHERE name = ?", [name]).fetchone()
        if row is None:
            return None
        return _shown(row)

    def get(self, name: str) -> dict[str, Any]:
        if (disk := self.find(name)) is None:
            raise ApiError("NOT_FOUND", f"The resource '{name}' was not found")
        return disk

    def page(self, project: str, labels: dict[str, str], after: str, size: int) -> list[tuple[str, dict[str, Any]]]:
        """Disks of all zones that have the labels, by full name and in order, beginning after a name."""
        rows = self.db.connection.execute(
            "SELECT name, user, body FROM compute_disks WHERE name > ? AND name LIKE ? ORDER BY name",
            [after, f"projects/{project}/zones/%"],
        )
        found = []
        for row in rows:
            disk = _shown(row)
            if labels.items() <= disk.get("labels", {}).items():
                found.append((row["name"], disk))
            if len(found) == size:
                break
        return found

    def list(self, parent: str) -> list[dict[str, Any]]:
        rows = self.db.connection.execute("SELECT name FROM compute_disks WHERE parent = ? ORDER BY name", [parent])
        return [self.get(row["name"]) for row in rows.fetchall()]

    def add(self, name: str, disk_id: int, disk: dict[str, Any]) -> None:
        parent = name.rsplit("/disks/", 1)[0]
        with self.db.transaction() as connection:
            connection.execute(
                "INSERT INTO compute_disks VALUES (?, ?, ?, '', ?)", [name, parent, disk_id, json.dumps(disk)]
            )

    def set_status(self, name: str, status: str) -> None:
        with self.db.transaction() as connection:
            connection.execute(
                "UPDATE compute_disks SET body = json_set(body, '$.status', ?) WHERE name = ?", [status, name]
            )

    def delete(self, name: str) -> None:
        if disk := self.find(name):
            shutil.rmtree(self._directory / disk["id"], ignore_errors=True)
        with self.db.transaction() as connection:
            connection.execute("DELETE FROM compute_disks WHERE name = ?", [name])

    def attach(self, name: str, user: str) -> None:
        """Give a disk to a machine. Raises ApiError when it is not there, or is another's."""
        disk = self.get(name)
        if disk["status"] != "READY":
            raise ApiError("FAILED_PRECONDITION", f"The resource '{name}' is not ready")
        if disk.get("users", [user]) != [user]:
            raise in_use(name, disk["users"][0])
        with self.db.transaction() as connection:
            connection.execute("UPDATE compute_disks SET user = ? WHERE name = ?", [user, name])

    def detach(self, user: str) -> None:
        """Take all of its disks from a machine."""
        with self.db.transaction() as connection:
            connection.execute("UPDATE compute_disks SET user = '' WHERE user = ?", [user])

    def content(self, name: str) -> Path:
        """The directory that stands for a disk's blocks."""
        directory = self._directory / str(self.get(name)["id"])
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def used_gb(self, parent: str) -> int:
        return sum(int(disk["sizeGb"]) for disk in self.list(parent))


def _shown(row: Any) -> dict[str, Any]:
    disk: dict[str, Any] = json.loads(row["body"])
    return {**disk, "users": [row["user"]]} if row["user"] else disk


def make_disk(body: dict[str, Any], parent: str, disk_id: int, now: float) -> dict[str, Any]:
    """A new disk as Compute Engine shows it. Raises INVALID_ARGUMENT for one that it would refuse."""
    if unknown := sorted(set(body) - FIELDS):
        raise ApiError("UNIMPLEMENTED", f"the local stack's disks have no {unknown!r}; they have {sorted(FIELDS)!r}")
    name, labels = body.get("name", ""), body.get("labels", {})
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _refuse("resource.name", name, f"Must be a match of regex '{NAME.pattern}'")
    zone = parent.rsplit("/", 1)[1]
    kind = str(body.get("type", DEFAULT_TYPE))
    kind_name = kind.rsplit("/", 1)[1] if kind.endswith(f"zones/{zone}/diskTypes/{kind.rsplit('/', 1)[-1]}") else kind
    if kind_name not in SIZES:
        raise _refuse("resource.type", kind, f"Expected zones/{zone}/diskTypes/ and one of {sorted(SIZES)!r}")
    size, (smallest, largest) = str(body.get("sizeGb", DEFAULT_GB)), SIZES[kind_name]
    if not size.isdecimal() or not smallest <= int(size) <= largest:
        raise _refuse("resource.sizeGb", size, f"Expected {smallest} to {largest}")
    check_labels(labels)
    return {
        **body,
        "kind": "compute#disk",
        "id": str(disk_id),
        "sizeGb": size,
        "type": f"{LINK}/{parent}/diskTypes/{kind_name}",
        "zone": f"{LINK}/{parent}",
        "selfLink": f"{LINK}/{parent}/disks/{name}",
        "status": "CREATING",
        "creationTimestamp": timestamp(now),
        "physicalBlockSizeBytes": "4096",
    }


def timestamp(when: float) -> str:
    """RFC 3339 with milliseconds, as this API writes times."""
    return datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")


def check_zone(parent: str) -> None:
    zone = parent.rsplit("/", 1)[1]
    if not ZONE.fullmatch(zone):
        raise _refuse("zone", zone, "Unknown zone.")


def check_labels(labels: Any) -> None:
    if not isinstance(labels, dict):
        raise _refuse("resource.labels", labels, "Expected an object")
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key) or not isinstance(value, str) or not LABEL_VALUE.fullmatch(value):
            raise _refuse(f"resource.labels.{key}", value, "Expected lowercase letters, numbers, '-' and '_'")


def in_use(name: str, user: str) -> ApiError:
    message = f"The disk resource '{name}' is already being used by '{user}'"
    return ApiError("FAILED_PRECONDITION", message)


def _refuse(field: str, value: Any, expected: str) -> ApiError:
    return ApiError("INVALID_ARGUMENT", f"Invalid value for field '{field}': {value!r}. {expected}")
