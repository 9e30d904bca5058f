"""The table of zonal persistent disks, and their contents.

A disk's content is a directory: blank until mkfs writes the file `filesystem` there, beside `files/`.
"""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from .rules import in_use

SCHEMA = """
CREATE TABLE IF NOT EXISTS compute_disks (
  name TEXT PRIMARY KEY, parent TEXT NOT NULL, id INTEGER NOT NULL, user TEXT NOT NULL, body TEXT NOT NULL
);
"""


class Disks:
    """Disks by full name (projects/P/zones/Z/disks/D), with their contents below `directory`."""

    def __init__(self, db: Database, directory: Path) -> None:
        self.db = db
        self._directory = directory.resolve()
        db.connection.executescript(SCHEMA)

    def find(self, name: str) -> dict[str, Any] | None:
        row = self.db.row("SELECT * FROM compute_disks WHERE name = ?", [name])
        return _shown(row) if row is not None else None

    def get(self, name: str) -> dict[str, Any]:
        if (disk := self.find(name)) is None:
            raise ApiError("NOT_FOUND", f"The resource '{name}' was not found")
        return disk

    def page(self, project: str, labels: dict[str, str], after: str, size: int) -> list[tuple[str, dict[str, Any]]]:
        """At most `size` disks of all zones of projects/P that have the labels, ordered by name, after a name."""
        rows = self.db.rows(
            "SELECT name, user, body FROM compute_disks WHERE name > ? AND name LIKE ? ORDER BY name",
            [after, f"{project}/zones/%"],
        )
        disks = ((row["name"], _shown(row)) for row in rows)
        return list(islice((item for item in disks if labels.items() <= item[1].get("labels", {}).items()), size))

    def list(self, parent: str) -> list[dict[str, Any]]:
        rows = self.db.rows("SELECT * FROM compute_disks WHERE parent = ? ORDER BY name", [parent])
        return [_shown(row) for row in rows]

    def add(self, name: str, disk_id: int, disk: dict[str, Any]) -> None:
        parent = name.rsplit("/disks/", 1)[0]
        self.db.write("INSERT INTO compute_disks VALUES (?, ?, ?, '', ?)", [name, parent, disk_id, json.dumps(disk)])

    def set_status(self, name: str, status: str) -> None:
        self.db.write("UPDATE compute_disks SET body = json_set(body, '$.status', ?) WHERE name = ?", [status, name])

    def delete(self, name: str) -> None:
        if disk := self.find(name):
            shutil.rmtree(self._directory / disk["id"], ignore_errors=True)
        self.db.write("DELETE FROM compute_disks WHERE name = ?", [name])

    def attach(self, name: str, user: str) -> None:
        """Attach a disk to a machine. Raises ApiError if the disk does not exist or has another user."""
        disk = self.get(name)
        if disk["status"] != "READY":
            raise ApiError("FAILED_PRECONDITION", f"The resource '{name}' is not ready")
        if disk.get("users", [user]) != [user]:
            raise in_use(name, disk["users"][0])
        self.db.write("UPDATE compute_disks SET user = ? WHERE name = ?", [user, name])

    def detach(self, user: str) -> None:
        """Detach all disks of a machine."""
        self.db.write("UPDATE compute_disks SET user = '' WHERE user = ?", [user])

    def release(self, name: str) -> None:
        """Detach a disk from its machine."""
        self.db.write("UPDATE compute_disks SET user = '' WHERE name = ?", [name])

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
