"""Resumable upload sessions, in the table storage_uploads, so that an upload goes on after a restart.

A row says how many bytes of the session's blob are durable; what the file holds beyond that never happened.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from .errors import StorageError
from .models import Attributes
from .preconditions import Preconditions

LIFETIME_SECONDS = 7 * 24 * 3600  # a session URI is good for one week
_SCHEMA = """
CREATE TABLE IF NOT EXISTS storage_uploads (
    id TEXT PRIMARY KEY, bucket TEXT NOT NULL, name TEXT NOT NULL, attributes TEXT NOT NULL,
    preconditions TEXT NOT NULL, hashes TEXT NOT NULL, blob TEXT, received INTEGER NOT NULL, created REAL NOT NULL,
    result TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS storage_uploads_blob ON storage_uploads (blob);
"""


@dataclass(frozen=True)
class Upload:
    """One session. `result` is the object resource once the upload is complete; then `blob` is the object's."""

    id: str
    bucket: str
    name: str
    attributes: Attributes
    preconditions: Preconditions
    hashes: dict[str, str]
    blob: str | None
    received: int
    result: dict[str, Any] | None


class Uploads:
    """All sessions that are open, or complete since less than a week."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        db.connection.executescript(_SCHEMA)
        expired = clock.now() - LIFETIME_SECONDS
        db.connection.execute("DELETE FROM storage_uploads WHERE created < ?", (expired,))

    def start(
        self,
        bucket: str,
        name: str,
        attributes: Attributes,
        preconditions: Preconditions,
        hashes: dict[str, str],
        blob: str,
    ) -> str:
        """Open a session and return its id."""
        upload_id = uuid.uuid4().hex
        row = (
            upload_id,
            bucket,
            name,
            json.dumps(attributes),
            json.dumps(asdict(preconditions)),
            json.dumps(hashes),
            blob,
            self._clock.now(),
        )
        with self._db.transaction() as connection:
            connection.execute("INSERT INTO storage_uploads VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?, NULL)", row)
        return upload_id

    def get(self, bucket: str, upload_id: str) -> Upload:
        query = "SELECT * FROM storage_uploads WHERE id = ? AND bucket = ?"
        row = self._db.connection.execute(query, (upload_id, bucket)).fetchone()
        if row is None:
            raise StorageError(
                404, "notFound", f"No such upload session in bucket {bucket!r}: {upload_id!r}; start a new upload"
            )
        return Upload(
            row["id"],
            row["bucket"],
            row["name"],
            json.loads(row["attributes"]),
            Preconditions(**json.loads(row["preconditions"])),
            json.loads(row["hashes"]),
            row["blob"],
            row["received"],
            json.loads(row["result"]) if row["result"] else None,
        )

    def record(self, upload_id: str, received: int) -> None:
        """Note that the first `received` bytes are on disk."""
        with self._db.transaction() as connection:
            connection.execute("UPDATE storage_uploads SET received = ? WHERE id = ?", (received, upload_id))

    def complete(self, upload_id: str, result: dict[str, Any]) -> None:
        """Note the resource that the upload became, for a client that never got the answer. In its transaction."""
        with self._db.transaction() as connection:
            connection.execute(
                "UPDATE storage_uploads SET blob = NULL, result = ? WHERE id = ?", (json.dumps(result), upload_id)
            )

    def delete(self, upload_id: str) -> None:
        with self._db.transaction() as connection:
            connection.execute("DELETE FROM storage_uploads WHERE id = ?", (upload_id,))
