"""Multipart uploads of the XML API: uploads and their parts, in the tables storage_multiparts and storage_parts.

They have no end: an upload waits for its completion or abortion, also after a restart.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from .blobs import BlobStore
from .errors import StorageError
from .models import Attributes, Content, rfc3339

_SCHEMA = """
CREATE TABLE IF NOT EXISTS storage_multiparts (
    id TEXT PRIMARY KEY, bucket TEXT NOT NULL, name TEXT NOT NULL, attributes TEXT NOT NULL, created TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS storage_parts (
    upload TEXT NOT NULL, number INTEGER NOT NULL, blob TEXT NOT NULL, size INTEGER NOT NULL, crc32c TEXT NOT NULL,
    md5 TEXT NOT NULL, etag TEXT NOT NULL, updated TEXT NOT NULL, PRIMARY KEY (upload, number)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS storage_parts_blob ON storage_parts (blob);
"""


@dataclass(frozen=True)
class Multipart:
    """An upload that is neither completed nor aborted."""

    id: str
    bucket: str
    name: str
    attributes: Attributes
    created: str


@dataclass(frozen=True)
class Part:
    """A part of an upload. `etag` has quotes, as in its header."""

    number: int
    content: Content
    etag: str
    updated: str


class Multiparts:
    """All open multipart uploads."""

    def __init__(self, db: Database, clock: Clock, blobs: BlobStore) -> None:
        self._db = db
        self._clock = clock
        self._blobs = blobs
        db.connection.executescript(_SCHEMA)

    def start(self, bucket: str, name: str, attributes: Attributes) -> Multipart:
        """Open an upload."""
        upload = Multipart(uuid.uuid4().hex, bucket, name, attributes, self._now())
        row = (upload.id, bucket, name, json.dumps(attributes), upload.created)
        self._db.write("INSERT INTO storage_multiparts VALUES (?, ?, ?, ?, ?)", row)
        return upload

    def get(self, bucket: str, name: str, upload_id: str) -> Multipart:
        """An open upload. Raises 404."""
        query = "SELECT * FROM storage_multiparts WHERE id = ? AND bucket = ? AND name = ?"
        if (row := self._db.row(query, (upload_id, bucket, name))) is None:
            raise StorageError(404, "NoSuchUpload", f"The requested upload was not found: {upload_id!r}")
        return _upload(row)

    def list(self, bucket: str, prefix: str, after: tuple[str, str], limit: int) -> Sequence[Multipart]:
        """Open uploads of a bucket by name and id, after a pair of both."""
        rows = self._db.rows(
            "SELECT * FROM storage_multiparts WHERE bucket = ? AND substr(name, 1, ?) = ? AND (name, id) > (?, ?)"
            " ORDER BY name, id LIMIT ?",
            (bucket, len(prefix), prefix, *after, limit),
        )
        return [_upload(row) for row in rows]

    def parts(self, upload_id: str, after: int = 0, limit: int = -1) -> Sequence[Part]:
        """The parts of an upload by number."""
        rows = self._db.rows(
            "SELECT * FROM storage_parts WHERE upload = ? AND number > ? ORDER BY number LIMIT ?",
            (upload_id, after, limit),
        )
        return [_part(row) for row in rows]

    def put(self, upload: Multipart, number: int, content: Content, etag: str) -> None:
        """Store a part in place of an earlier one. Raises 404 if the upload has ended meanwhile."""
        with self._db.transaction() as connection:
            self.get(upload.bucket, upload.name, upload.id)
            self._remove("SELECT blob FROM storage_parts WHERE upload = ? AND number = ?", (upload.id, number))
            if content.data is not None:
                self._blobs.keep_small(content.blob, content.data)
            row = (upload.id, number, content.blob, content.size, content.crc32c, content.md5, etag, self._now())
            connection.execute("INSERT OR REPLACE INTO storage_parts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def end(self, upload: Multipart) -> None:
        """Forget an upload and the bytes of its parts. Raises 404 if it has ended meanwhile."""
        with self._db.transaction() as connection:
            self.get(upload.bucket, upload.name, upload.id)
            self._remove("SELECT blob FROM storage_parts WHERE upload = ?", (upload.id,))
            connection.execute("DELETE FROM storage_parts WHERE upload = ?", (upload.id,))
            connection.execute("DELETE FROM storage_multiparts WHERE id = ?", (upload.id,))

    def _remove(self, query: str, values: tuple[object, ...]) -> None:
        """Remove the bytes of parts: a small blob now, a file after the commit."""
        for row in self._db.rows(query, values):
            blob = row["blob"]
            if not self._blobs.remove_small(blob):
                self._db.after_commit(lambda blob=blob: self._blobs.remove(blob))  # type: ignore[misc]

    def _now(self) -> str:
        return rfc3339(self._clock.now())


def _upload(row: sqlite3.Row) -> Multipart:
    return Multipart(row["id"], row["bucket"], row["name"], json.loads(row["attributes"]), row["created"])


def _part(row: sqlite3.Row) -> Part:
    content = Content(row["blob"], row["size"], row["crc32c"], row["md5"])
    return Part(row["number"], content, row["etag"], row["updated"])
