"""The storage emulator's records: buckets, object versions, and the changes that it reports."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..kit import times
from .preconditions import etag_of

Event = Literal["finalized", "deleted", "metadataUpdated", "archived"]
Attributes = dict[str, Any]
Edit = Callable[[Attributes], Attributes]


@dataclass(frozen=True)
class ObjectChange:
    """A change of one object. `event` ends Eventarc's event type; `resource` is StorageObjectData as JSON.

    A new version names the generation that it `overwrote`, and the old version the one that it is `overwritten_by`.
    """

    event: Event
    resource: dict[str, Any]
    overwrote: int | None = None
    overwritten_by: int | None = None


@dataclass(frozen=True)
class Content:
    """The blob with an object version's bytes, and their hashes. A composite object has no MD5.

    `data` holds the bytes of a small blob until they are stored.
    """

    blob: str
    size: int
    crc32c: str
    md5: str | None = None
    component_count: int | None = None
    data: bytes | None = None


@dataclass(frozen=True)
class StoredObject:
    """One version of one object. `attributes` are the fields that callers set (contentType, metadata, ...)."""

    bucket: str
    name: str
    generation: int
    metageneration: int
    live: bool
    content: Content
    attributes: Attributes
    created: str
    updated: str
    deleted: str | None

    @property
    def etag(self) -> str:
        return etag_of(self.generation, self.metageneration)

    @classmethod
    def from_row(cls, row: sqlite3.Row) -> StoredObject:
        return cls(
            row["bucket"],
            row["name"],
            row["generation"],
            row["metageneration"],
            bool(row["live"]),
            Content(row["blob"], row["size"], row["crc32c"], row["md5"], row["component_count"]),
            json.loads(row["attributes"]),
            row["created"],
            row["updated"],
            row["deleted"],
        )


@dataclass(frozen=True)
class Bucket:
    """One bucket. `attributes` are the fields that callers set (location, labels, lifecycle, versioning, ...)."""

    name: str
    metageneration: int
    attributes: Attributes
    created: str
    updated: str
    policy: dict[str, Any] = field(default_factory=dict)

    @property
    def versioned(self) -> bool:
        return bool((self.attributes.get("versioning") or {}).get("enabled"))

    @classmethod
    def from_row(cls, row: sqlite3.Row) -> Bucket:
        return cls(
            row["name"],
            row["metageneration"],
            json.loads(row["attributes"]),
            row["created"],
            row["updated"],
            json.loads(row["policy"]),
        )


def rfc3339(seconds: float) -> str:
    """A Unix time as Cloud Storage writes it, in milliseconds."""
    return times.rfc3339(seconds, "milliseconds")
