"""Cloud Storage behind google.cloud.storage.Client: objects with generations, and preconditions."""

from __future__ import annotations

import hashlib
import io
import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import google_crc32c
from google.api_core.exceptions import NotFound, PreconditionFailed

from .world import World

T = TypeVar("T")
_JSON = ("places.json", "record.json", "MANIFEST.json", "_COMPLETE")


class StoredObject(NamedTuple):
    """One generation of an object."""

    data: bytes
    generation: int
    created: float
    metadata: dict[str, str] = {}


class Storage:
    """The client and the service. `uploaded` is called for each new object: (bucket, name, generation)."""

    def __init__(self, world: World, buckets: tuple[str, ...]) -> None:
        self.world = world
        self.objects: dict[str, dict[str, StoredObject]] = {bucket: {} for bucket in buckets}
        self.uploaded: Callable[[str, str, int, int], None] = lambda *_: None
        self.deleted: Callable[[str, str, int], None] = lambda *_: None
        self._generation = 1_700_000_000_000_000

    # The client's side

    def bucket(self, name: str) -> Bucket:
        return Bucket(self, name)

    def get_bucket(self, name: str, **_: Any) -> Bucket:
        return Bucket(self, name)

    def list_blobs(
        self,
        bucket: Any,
        prefix: str = "",
        delimiter: str | None = None,
        start_offset: str | None = None,
        end_offset: str | None = None,
        max_results: int | None = None,
        **_: Any,
    ) -> Listing:
        name = bucket if isinstance(bucket, str) else bucket.name

        def read() -> tuple[list[Blob], list[str]]:
            names = self._names(name, prefix or "")
            kept, prefixes = [], set()
            for key in names:
                if not key.startswith(prefix or "") or (start_offset and key < start_offset):
                    continue
                if end_offset and key >= end_offset:
                    continue
                rest = key[len(prefix or "") :]
                if delimiter and delimiter in rest:
                    prefixes.add((prefix or "") + rest.split(delimiter)[0] + delimiter)
                else:
                    kept.append(self._blob(name, key))
            return kept[:max_results], sorted(prefixes)

        return Listing(lambda: self.world.effect("storage.list", read))

    # The service's side

    def put(
        self,
        bucket: str,
        name: str,
        data: bytes,
        if_generation_match: int | None = None,
        metadata: dict[str, str] | None = None,
    ) -> int:
        """Write an object; returns its generation. Raises PreconditionFailed."""
        objects = self._bucket(bucket)
        present = objects[name].generation if name in objects else 0
        if if_generation_match is not None and if_generation_match != present:
            raise PreconditionFailed(f"generation is {present}")
        self._generation += 1
        objects[name] = StoredObject(data, self._generation, self.world.now, metadata or {})
        leaf = name.rsplit("/", 1)[-1]
        shown = json.loads(data) if leaf in _JSON else len(data)
        about = {"generation": self._generation, "replaced": present, "by": self.world.scheduler.current.name}
        if metadata:
            about["metadata"] = metadata
        self.world.fact("write", bucket=bucket, name=name, **about, content=shown)
        if present:
            self.deleted(bucket, name, present)  # the service sends a `deleted` event for a replaced object, too
        self.uploaded(bucket, name, self._generation, len(data))
        return self._generation

    def get(self, bucket: str, name: str, generation: int | None = None) -> StoredObject:
        stored = self._bucket(bucket).get(name)
        if stored is None or generation not in (None, stored.generation):
            raise NotFound(f"No such object: {bucket}/{name}")
        return stored

    def find(self, bucket: str, name: str) -> StoredObject | None:
        return self._bucket(bucket).get(name)

    def remove(self, bucket: str, name: str) -> None:
        stored = self.get(bucket, name)
        del self.objects[bucket][name]
        self.world.fact("delete", bucket=bucket, name=name, generation=stored.generation)
        self.deleted(bucket, name, stored.generation)

    def _bucket(self, name: str) -> dict[str, StoredObject]:
        if name not in self.objects:
            raise NotFound(f"The specified bucket does not exist: {name}")
        return self.objects[name]

    def _names(self, bucket: str, prefix: str) -> Sequence[str]:
        """The names of the objects that begin with `prefix`, in order."""
        return sorted(name for name in self._bucket(bucket) if name.startswith(prefix))

    def _blob(self, bucket: str, name: str) -> Blob:
        stored = self.objects[bucket][name]
        blob = Blob(self, bucket, name)
        blob.seen(stored)
        return blob


class Listing:
    """A listing that is read on first use: an iterator with `pages` and `prefixes`."""

    def __init__(self, read: Callable[[], tuple[list[Blob], list[str]]]) -> None:
        self._read = read
        self.prefixes: set[str] = set()

    @property
    def pages(self) -> Iterator[Listing]:
        blobs, prefixes = self._read()
        page = Listing(lambda: (blobs, prefixes))
        self.prefixes = page.prefixes = set(prefixes)
        yield page

    def __iter__(self) -> Iterator[Blob]:
        blobs, prefixes = self._read()
        self.prefixes = set(prefixes)
        return iter(blobs)


class Bucket:
    """google.cloud.storage.Bucket."""

    def __init__(self, client: Storage, name: str) -> None:
        self.client = client
        self.name = name

    def blob(self, name: str, generation: int | None = None, **_: Any) -> Blob:
        blob = Blob(self.client, self.name, name)
        blob.generation = generation
        return blob

    def get_blob(self, name: str, **_: Any) -> Blob | None:
        def read() -> Blob | None:
            return self.client._blob(self.name, name) if name in self.client._bucket(self.name) else None

        return self.client.world.effect("storage.get", read)

    def list_blobs(self, **options: Any) -> Listing:
        return self.client.list_blobs(self.name, **options)


class Blob:
    """google.cloud.storage.Blob."""

    def __init__(self, client: Storage, bucket: str, name: str) -> None:
        self._client = client
        self._bucket = bucket
        self.name = name
        self.generation: int | None = None
        self.metageneration = 1
        self.metadata: dict[str, str] | None = None
        self.size: int | None = None
        self.crc32c: str | None = None
        self.md5_hash: str | None = None
        self.time_created: datetime | None = None
        self.updated: datetime | None = None

    @property
    def bucket(self) -> Bucket:
        return Bucket(self._client, self._bucket)

    @property
    def client(self) -> Storage:
        return self._client

    def seen(self, stored: StoredObject) -> None:
        self.generation, self.size = stored.generation, len(stored.data)
        self.metadata = stored.metadata
        self.crc32c = b64encode(google_crc32c.Checksum(stored.data).digest()).decode()
        self.md5_hash = b64encode(hashlib.md5(stored.data, usedforsecurity=False).digest()).decode()
        self.time_created = self.updated = datetime.fromtimestamp(stored.created, UTC)

    def upload_from_string(
        self, data: bytes | str, content_type: str = "", if_generation_match: int | None = None, **_: Any
    ) -> None:
        encoded = data.encode() if isinstance(data, str) else data

        def write() -> None:
            self.generation = self._client.put(self._bucket, self.name, encoded, if_generation_match, self.metadata)

        self._effect("put", self._again(write), changes=True)

    def download_as_bytes(self, **_: Any) -> bytes:
        def read() -> bytes:
            stored = self._client.get(self._bucket, self.name, self.generation)
            self.seen(stored)
            return stored.data

        return self._effect("get", read)

    def open(self, mode: str) -> io.BytesIO:
        """The object as a file to read."""
        return io.BytesIO(self.download_as_bytes())

    def upload_from_filename(self, filename: str, **_: Any) -> None:
        data = Path(filename).read_bytes()

        def write() -> None:
            self._client.put(self._bucket, self.name, data, None, self.metadata)
            self.seen(self._client.get(self._bucket, self.name))

        self._effect("put", self._again(write), changes=True)

    def download_to_filename(self, filename: str, **_: Any) -> None:
        Path(filename).write_bytes(self.download_as_bytes())

    def delete(self, **_: Any) -> None:
        self._effect("delete", lambda: self._client.remove(self._bucket, self.name), changes=True)

    def exists(self, **_: Any) -> bool:
        return self._effect("get", lambda: self.name in self._client._bucket(self._bucket))

    def reload(self, **_: Any) -> None:
        self._effect("get", lambda: self.seen(self._client.get(self._bucket, self.name)))

    def _effect(self, verb: str, action: Callable[[], T], *, changes: bool = False) -> T:
        return self._client.world.effect(f"storage.{verb} {self.name}", action, changes=changes)

    def _again(self, write: Callable[[], None]) -> Callable[[], None]:
        """Retry a write as the library does. If only the reply was lost, the retry's precondition fails."""
        world = self._client.world

        def twice() -> None:
            write()
            if world.happens(world.faults.lost):
                world.fact("fault", what="repeated", call=f"storage.put {self.name}")
                write()

        return twice
