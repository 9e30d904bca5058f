"""The state that the routes of the storage emulator share."""

from __future__ import annotations

from dataclasses import dataclass

from dropforge_local.base.db import Database

from .blobs import BlobStore
from .buckets import Buckets
from .objects import Objects
from .uploads import Uploads


@dataclass(frozen=True)
class State:
    """The tables and the blob directory of one emulator."""

    db: Database
    blobs: BlobStore
    buckets: Buckets
    objects: Objects
    uploads: Uploads
    project: str

    @property
    def project_number(self) -> str:
        """A stable project number for bucket resources."""
        return str(sum(byte << (8 * index) for index, byte in enumerate(self.project.encode()[:4])))
