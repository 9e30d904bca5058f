"""Resumable upload sessions, in the table storage_uploads, so that an upload continues after a restart.

A row has the number of durable bytes in the session's blob. Bytes of the file beyond that number do not count.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from .errors import StorageError
from .models import Attributes
from .preconditions import Preconditions

LIFETIME_SECONDS = 7 * 24 * 3600  # a session URI is valid for one week
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
    """A session.

    A complete session has a `result`, the object resource, and no `blob`: the object owns the blob.
    """

    id: str
    received: int
    bucket: str
    name: str
    attributes: Attributes
    preconditions: Preconditions
    hashes: dict[str, str]
    blob: str | None
    result: dict[str, Any] | None = None


class Uploads:
    """The sessions of the last week, open or complete."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        db.connection.executescript(_SCHEMA)
        expired = clock.now() - LIFETIME_SECONDS
        db.connection.execute("DELETE FROM storage_uploads WHERE created < ?", (expired,))

    def start(self, upload: Upload) -> None:
        """Open a session."""
        texts = (json.dumps(part) for part in (upload.attributes, asdict(upload.preconditions), upload.hashes))
        row = (upload.id, upload.bucket, upload.name, *texts, upload.blob, upload.received, self._clock.now())
        self._db.write("INSERT INTO storage_uploads VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)", row)

    def get(self, bucket: str, upload_id: str) -> Upload:
        query = "SELECT * FROM storage_uploads WHERE id = ? AND bucket = ?"
        row = self._db.row(query, (upload_id, bucket))
        if row is None:
            raise StorageError(
                404, "notFound", f"No such upload session in bucket {bucket!r}: {upload_id!r}; start a new upload"
            )
        return Upload(
            row["id"],
            row["received"],
            row["bucket"],
            row["name"],
            json.loads(row["attributes"]),
            Preconditions(**json.loads(row["preconditions"])),
            json.loads(row["hashes"]),
            row["blob"],
            json.loads(row["result"]) if row["result"] else None,
        )

    def record(self, upload_id: str, received: int) -> None:
        """Record that the first `received` bytes are on disk."""
        self._db.write("UPDATE storage_uploads SET received = ? WHERE id = ?", (received, upload_id))

    def complete(self, upload_id: str, result: dict[str, Any]) -> None:
        """Record the object resource, for a client that lost the answer; in the object's transaction."""
        self._db.write(
            "UPDATE storage_uploads SET blob = NULL, result = ? WHERE id = ?", (json.dumps(result), upload_id)
        )

    def delete(self, upload_id: str) -> None:
        self._db.write("DELETE FROM storage_uploads WHERE id = ?", (upload_id,))
