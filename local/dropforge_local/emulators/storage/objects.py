"""Object versions, in the table storage_objects. A change and its events are one transaction."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from .blobs import BlobStore
from .buckets import Buckets
from .errors import object_not_found
from .models import Attributes, Bucket, Content, Edit, Event, ObjectChange, StoredObject, rfc3339
from .names import check_object_name
from .permissions import require_object
from .preconditions import Preconditions
from .resources import PUBLIC_URL, object_json
from .retention import after_change, check_removal, of_new_object

_SCHEMA = """
CREATE TABLE IF NOT EXISTS storage_objects (
    bucket TEXT NOT NULL, name TEXT NOT NULL, generation INTEGER NOT NULL, metageneration INTEGER NOT NULL,
    live INTEGER NOT NULL, blob TEXT NOT NULL, size INTEGER NOT NULL, crc32c TEXT NOT NULL, md5 TEXT,
    component_count INTEGER, attributes TEXT NOT NULL, created TEXT NOT NULL, updated TEXT NOT NULL, deleted TEXT,
    PRIMARY KEY (bucket, name, generation)
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS storage_objects_live ON storage_objects (bucket, name) WHERE live = 1;
CREATE INDEX IF NOT EXISTS storage_objects_blob ON storage_objects (blob);
CREATE TABLE IF NOT EXISTS storage_generation (last INTEGER NOT NULL);
INSERT INTO storage_generation SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM storage_generation);
"""

OnChange = Callable[[ObjectChange], None]


class Objects:
    """All object versions. `on_change` is called inside the transaction that makes the change."""

    def __init__(self, db: Database, clock: Clock, buckets: Buckets, blobs: BlobStore, on_change: OnChange) -> None:
        self._db = db
        self._clock = clock
        self._buckets = buckets
        self._blobs = blobs
        self._on_change = on_change
        db.connection.executescript(_SCHEMA)

    def find(self, bucket: str, name: str, generation: int | None = None) -> StoredObject | None:
        """The live version, or the version of `generation`, live or archived."""
        query = "SELECT * FROM storage_objects WHERE bucket = ? AND name = ? AND "
        if generation is None:
            row = self._db.row(query + "live = 1", (bucket, name))
        else:
            row = self._db.row(query + "generation = ?", (bucket, name, generation))
        return StoredObject.from_row(row) if row else None

    def get(
        self, bucket: str, name: str, generation: int | None = None, preconditions: Preconditions | None = None
    ) -> StoredObject:
        """The version, as in `find`. Raises 404 if it does not exist, 412 or 304 if a precondition does not hold."""
        stored = self.find(bucket, name, generation)
        if stored is None:
            require_object("storage.objects.list", bucket, name)  # who may not list does not learn that it is missing
            self._buckets.get(bucket)
            raise object_not_found(bucket, name, generation)
        if preconditions:
            preconditions.check(stored.generation, stored.metageneration)
        return stored

    def check_create(self, bucket: str, name: str, preconditions: Preconditions) -> tuple[Bucket, StoredObject | None]:
        """Raise unless a new version of (bucket, name) may be created; return the bucket and the live version."""
        check_object_name(name)
        require_object("storage.objects.create", bucket, name)
        owner = self._buckets.get(bucket)
        live = self.find(bucket, name)
        if live:
            require_object("storage.objects.delete", bucket, name)
        if live:
            preconditions.check(live.generation, live.metageneration)
            check_removal(owner, live, self._clock.now())
        else:
            preconditions.check_absent()
        return owner, live

    def create(
        self, bucket: str, name: str, content: Content, attributes: Attributes, preconditions: Preconditions
    ) -> StoredObject:
        """Create a new live version. A large blob must be on disk; on an error the caller discards it."""
        with self._db.transaction():
            owner, live = self.check_create(bucket, name, preconditions)
            generation = self._next_generation()
            if live:
                self._retire(owner, live, generation)
            now, attributes = rfc3339(self._clock.now()), of_new_object(owner, attributes)
            stored = StoredObject(bucket, name, generation, 1, True, content, attributes, now, now, None)
            self._insert(stored)
            if live:
                self._drop_bytes(live)
            self._report("finalized", stored, overwrote=live.generation if live else None)
        return stored

    def change(
        self, bucket: str, name: str, generation: int | None, preconditions: Preconditions, edit: Edit
    ) -> StoredObject:
        """Replace a version's attributes by `edit(attributes)`, with the next metageneration."""
        with self._db.transaction() as connection:
            old = self.get(bucket, name, generation, preconditions)
            stored = replace(
                old,
                metageneration=old.metageneration + 1,
                attributes=after_change(edit(old.attributes), old.attributes, self._clock.now()),
                updated=rfc3339(self._clock.now()),
            )
            attributes = json.dumps(stored.attributes)
            connection.execute(
                "UPDATE storage_objects SET metageneration = ?, attributes = ?, updated = ? "
                "WHERE bucket = ? AND name = ? AND generation = ?",
                (stored.metageneration, attributes, stored.updated, bucket, name, stored.generation),
            )
            self._report("metadataUpdated", stored)
        return stored

    def delete(self, bucket: str, name: str, generation: int | None, preconditions: Preconditions) -> None:
        """Delete a generation permanently; without `generation`, the live version, which versioning archives."""
        with self._db.transaction():
            stored, owner = self.get(bucket, name, generation, preconditions), self._buckets.get(bucket)
            check_removal(owner, stored, self._clock.now())
            if generation is None:
                self._retire(owner, stored)
            else:
                self._erase(stored)
            self._drop_bytes(stored)

    def move(self, bucket: str, source: StoredObject, name: str, preconditions: Preconditions) -> StoredObject:
        """Rename in one transaction: the new name gets a new generation and the same bytes."""
        with self._db.transaction():
            stored = self.create(bucket, name, source.content, source.attributes, preconditions)
            self.delete(bucket, source.name, None, Preconditions())
        return stored

    def discard_blob(self, blob: str) -> None:
        """Remove a blob's file unless an object or an upload still refers to it: copies share a blob."""
        if not self._is_in_use(blob):
            self._blobs.remove(blob)

    def _is_in_use(self, blob: str) -> bool:
        tables = ("storage_objects", "storage_uploads", "storage_parts")
        query = " UNION ALL ".join(f"SELECT 1 FROM {table} WHERE blob = ?" for table in tables)
        return self._db.row(query, (blob,) * len(tables)) is not None

    def _drop_bytes(self, stored: StoredObject) -> None:
        """Remove the bytes of a deleted version unless they are in use: a small blob now, a file after the commit."""
        blob = stored.content.blob
        if not self._is_in_use(blob) and not self._blobs.remove_small(blob):
            self._db.after_commit(lambda: self.discard_blob(blob))

    def _retire(self, owner: Bucket, live: StoredObject, by: int | None = None) -> None:
        """Archive the live version in a bucket with versioning; delete it in any other bucket.

        `by` is the generation that overwrites it.
        """
        if not owner.versioned:
            self._erase(live, by)
            return
        archived = replace(live, live=False, deleted=rfc3339(self._clock.now()))
        self._db.connection.execute(
            "UPDATE storage_objects SET live = 0, deleted = ? WHERE bucket = ? AND name = ? AND generation = ?",
            (archived.deleted, live.bucket, live.name, live.generation),
        )
        self._report("archived", archived, overwritten_by=by)

    def _erase(self, stored: StoredObject, by: int | None = None) -> None:
        self._db.connection.execute(
            "DELETE FROM storage_objects WHERE bucket = ? AND name = ? AND generation = ?",
            (stored.bucket, stored.name, stored.generation),
        )
        deleted = replace(stored, live=False, deleted=stored.deleted or rfc3339(self._clock.now()))
        self._report("deleted", deleted, overwritten_by=by)

    def _insert(self, stored: StoredObject) -> None:
        content = stored.content
        if content.data is not None:
            self._blobs.keep_small(content.blob, content.data)
        self._db.connection.execute(
            "INSERT INTO storage_objects VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?, ?, NULL)",
            (
                stored.bucket,
                stored.name,
                stored.generation,
                stored.metageneration,
                content.blob,
                content.size,
                content.crc32c,
                content.md5,
                content.component_count,
                json.dumps(stored.attributes),
                stored.created,
                stored.updated,
            ),
        )

    def _next_generation(self) -> int:
        """Microseconds since the epoch, but above every earlier generation, also those of an earlier process."""
        connection = self._db.connection
        now = int(self._clock.now() * 1_000_000)
        connection.execute("UPDATE storage_generation SET last = max(last + 1, ?)", (now,))
        generation: int = connection.execute("SELECT last FROM storage_generation").fetchone()[0]
        return generation

    def _report(self, event: Event, stored: StoredObject, **others: int | None) -> None:
        self._on_change(ObjectChange(event, object_json(stored, PUBLIC_URL), **others))
