"""Object bytes: immutable blobs with random names, so that no object name reaches the disk.

A small blob is a row, written in the transaction of its object: creating a file costs ten times as much. A large blob
is a file, written and fsynced before the transaction of its object. A crash between the two leaves a file without an
object; `sweep` deletes such files at start.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

import google_crc32c

from dropforge_local.base.db import Database

from .errors import disk_failed
from .models import Content

# After a broken connection, a resumable upload keeps a multiple of this number of bytes, as the real service does.
GRANULE_BYTES = 256 * 1024
FLUSH_BYTES = 4 * GRANULE_BYTES
SMALL_BYTES = 64 * 1024
_SCHEMA = "CREATE TABLE IF NOT EXISTS storage_small (blob TEXT PRIMARY KEY, data BLOB NOT NULL)"
T = TypeVar("T")


class Digest:
    """Size, MD5 and CRC32C of the bytes seen so far."""

    def __init__(self) -> None:
        self.size = 0
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._crc32c = google_crc32c.Checksum()

    def update(self, data: bytes) -> None:
        self.size += len(data)
        self._md5.update(data)
        self._crc32c.update(data)

    @property
    def md5(self) -> str:
        return base64.b64encode(self._md5.digest()).decode()

    @property
    def crc32c(self) -> str:
        return base64.b64encode(self._crc32c.digest()).decode()


class BlobStore:
    """The table of small blobs and the directory of large blobs. Disk work runs on this store's own threads."""

    def __init__(self, db: Database, root: Path) -> None:
        self._db = db
        self._root = root
        db.connection.execute(_SCHEMA)
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="storage-blob")
        root.mkdir(parents=True, exist_ok=True)

    def writer(self) -> BlobWriter:
        """A writer of a new, empty blob."""
        return BlobWriter(self, uuid.uuid4().hex, Digest())

    def path(self, blob: str) -> Path:
        return self._root / blob[:2] / blob

    def open(self, blob: str) -> BinaryIO:
        """Open a blob for reading. The bytes stay readable through the file after the blob is removed."""
        row = self._db.row("SELECT data FROM storage_small WHERE blob = ?", (blob,))
        return io.BytesIO(row["data"]) if row else self.path(blob).open("rb")

    def keep_small(self, blob: str, data: bytes) -> None:
        """Store a small blob, in the transaction of its object."""
        self._db.connection.execute("INSERT INTO storage_small VALUES (?, ?)", (blob, data))

    def remove_small(self, blob: str) -> bool:
        """Remove a small blob, in the transaction of its object. Returns False for a large blob."""
        return self._db.connection.execute("DELETE FROM storage_small WHERE blob = ?", (blob,)).rowcount > 0

    def remove(self, blob: str) -> None:
        self.path(blob).unlink(missing_ok=True)

    def sweep(self, keep: Collection[str]) -> int:
        """Delete every file that is not in `keep`; return their number."""
        strays = [path for path in self._root.glob("??/*") if path.name not in keep]
        for path in strays:
            path.unlink()
        return len(strays)

    async def digest(self, blob: str, size: int) -> Digest:
        """Hash the first `size` bytes of a blob again, for an upload that continues after a restart."""
        return await self.run(_hash_file, self.path(blob), size)

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """Run disk work on a thread of this store. An OSError, such as a full disk, becomes 507."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        except OSError as error:
            raise disk_failed(error) from error

    def close(self) -> None:
        self._threads.shutdown()


class BlobWriter:
    """Appends to one blob in large pieces and hashes them. `digest.size` is always the size of the file."""

    def __init__(self, store: BlobStore, blob: str, digest: Digest) -> None:
        self.blob = blob
        self.digest = digest
        self._store = store
        self._buffer = bytearray()

    async def write(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= FLUSH_BYTES:
            await self._flush(len(self._buffer) // GRANULE_BYTES * GRANULE_BYTES)

    async def finish(self) -> Content:
        """Write and fsync the rest; the caller stores a small blob, in `Content.data`, with its object."""
        if not self.digest.size and len(self._buffer) <= SMALL_BYTES:
            data = bytes(self._buffer)
            self.digest.update(data)
            return Content(self.blob, self.digest.size, self.digest.crc32c, self.digest.md5, data=data)
        await self._flush(len(self._buffer), sync=True)
        return Content(self.blob, self.digest.size, self.digest.crc32c, self.digest.md5)

    async def keep_granules(self) -> int:
        """Write and fsync the complete granules, drop the rest; return the blob's size."""
        await self._flush(len(self._buffer) // GRANULE_BYTES * GRANULE_BYTES, sync=True)
        self._buffer.clear()
        return self.digest.size

    async def _flush(self, count: int, sync: bool = False) -> None:
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        await self._store.run(_append, self._store.path(self.blob), data, self.digest, sync)


def _append(path: Path, data: bytes, digest: Digest, sync: bool) -> None:
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        # Drop bytes of a write that failed, or that a crash kept from being recorded.
        file.truncate(digest.size)
        file.seek(digest.size)
        file.write(data)
        file.flush()
        if sync:
            os.fsync(descriptor)
    digest.update(data)


def _hash_file(path: Path, size: int) -> Digest:
    digest = Digest()
    with path.open("rb") as file:
        while chunk := file.read(min(FLUSH_BYTES, size - digest.size)):
            digest.update(chunk)
    return digest
