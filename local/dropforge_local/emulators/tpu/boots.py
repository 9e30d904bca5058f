"""The boots of nodes. Each boot has an id, by which users read the output of ended machines."""

from __future__ import annotations

from dropforge_local.base.db import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS tpu_boots (
  id TEXT PRIMARY KEY, node TEXT NOT NULL, started REAL NOT NULL, ended INTEGER NOT NULL
);
"""


class Boots:
    """The ids of boots in SQLite, oldest first."""

    def __init__(self, db: Database) -> None:
        self._db = db
        db.connection.executescript(SCHEMA)

    def add(self, boot_id: str, node: str, started: float) -> None:
        """Record a boot; a known boot stays as it is."""
        self._db.write("INSERT OR IGNORE INTO tpu_boots VALUES (?, ?, ?, 0)", [boot_id, node, started])

    def of(self, node: str) -> list[str]:
        """The ids of a node's boots, oldest first; also after the node's deletion."""
        rows = self._db.rows("SELECT id FROM tpu_boots WHERE node = ? ORDER BY started, rowid", [node])
        return [row["id"] for row in rows]
