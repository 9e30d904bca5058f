"""Buckets and their IAM policies, in the table storage_buckets."""

from __future__ import annotations

import base64
import hashlib
import json
import sqlite3
from typing import Any

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from .errors import StorageError, bucket_not_found, invalid, precondition_failed
from .models import Attributes, Bucket, Edit, rfc3339
from .names import check_bucket_name
from .preconditions import Preconditions
from .retention import take_effect

_SCHEMA = """
CREATE TABLE IF NOT EXISTS storage_buckets (
    name TEXT PRIMARY KEY, metageneration INTEGER NOT NULL, attributes TEXT NOT NULL,
    created TEXT NOT NULL, updated TEXT NOT NULL, policy TEXT NOT NULL
) WITHOUT ROWID
"""
_MEMBER = ("allUsers", "allAuthenticatedUsers")
_MEMBER_PREFIXES = (
    "user:", "serviceAccount:", "group:", "domain:", "projectViewer:", "projectEditor:", "projectOwner:", "principal:",
    "principalSet:", "deleted:",
)  # fmt: skip


class Buckets:
    """All buckets of the local project."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        db.connection.execute(_SCHEMA)

    def create(self, name: str, attributes: Attributes) -> Bucket:
        check_bucket_name(name)
        now = rfc3339(self._clock.now())
        row = (name, 1, json.dumps(take_effect(attributes, self._clock.now())), now, now, "{}")
        with self._db.transaction() as connection:
            try:
                connection.execute("INSERT INTO storage_buckets VALUES (?, ?, ?, ?, ?, ?)", row)
            except sqlite3.IntegrityError:
                message = "Your previous request to create the named bucket succeeded and you already own it."
                raise StorageError(409, "conflict", f"{message} ({name!r})") from None
        return self.get(name)

    def get(self, name: str, preconditions: Preconditions | None = None) -> Bucket:
        row = self._db.row("SELECT * FROM storage_buckets WHERE name = ?", (name,))
        if row is None:
            raise bucket_not_found(name)
        bucket = Bucket.from_row(row)
        if preconditions:
            preconditions.check(None, bucket.metageneration)
        return bucket

    def exists(self, name: str) -> bool:
        query = "SELECT 1 FROM storage_buckets WHERE name = ?"
        return self._db.row(query, (name,)) is not None

    def list(self, prefix: str, after: str, limit: int) -> list[Bucket]:
        """At most `limit` buckets after the name `after`, with names that begin with `prefix`, by name."""
        query = "SELECT * FROM storage_buckets WHERE name >= ? AND name > ? ORDER BY name LIMIT ?"
        rows = self._db.connection.execute(query, (prefix, after, limit))
        return [Bucket.from_row(row) for row in rows if row["name"].startswith(prefix)]

    def change(self, name: str, preconditions: Preconditions, edit: Edit) -> Bucket:
        """Replace a bucket's attributes by `edit(attributes)`."""
        with self._db.transaction() as connection:
            bucket = self.get(name, preconditions)
            attributes = take_effect(edit(bucket.attributes), self._clock.now())
            connection.execute(
                "UPDATE storage_buckets SET metageneration = metageneration + 1, attributes = ?, updated = ? "
                "WHERE name = ?",
                (json.dumps(attributes), rfc3339(self._clock.now()), name),
            )
            return self.get(name)

    def delete(self, name: str, preconditions: Preconditions) -> None:
        with self._db.transaction() as connection:
            self.get(name, preconditions)
            query = "SELECT 1 FROM storage_objects WHERE bucket = ? LIMIT 1"
            if connection.execute(query, (name,)).fetchone():
                raise StorageError(409, "conflict", f"The bucket you tried to delete is not empty: {name!r}.")
            connection.execute("DELETE FROM storage_buckets WHERE name = ?", (name,))
            connection.execute("DELETE FROM storage_notifications WHERE bucket = ?", (name,))

    def policy(self, name: str) -> dict[str, Any]:
        """The IAM policy; `set_policy` compares its etag, so that a read-modify-write is safe."""
        policy = {"kind": "storage#policy", "resourceId": f"projects/_/buckets/{name}", "version": 1, "bindings": []}
        policy |= self.get(name).policy
        digest = hashlib.sha256(json.dumps([policy["version"], policy["bindings"]]).encode()).digest()
        return policy | {"etag": base64.b64encode(digest[:6]).decode()}

    def set_policy(self, name: str, policy: dict[str, Any]) -> dict[str, Any]:
        bindings = _checked_bindings(policy)
        with self._db.transaction() as connection:
            current = self.policy(name)["etag"]
            if policy.get("etag") not in (None, "", current):
                raise precondition_failed(f"the policy's etag is {policy['etag']!r}, the current etag is {current!r}.")
            kept = json.dumps({"bindings": bindings, "version": policy.get("version") or 1})
            connection.execute("UPDATE storage_buckets SET policy = ? WHERE name = ?", (kept, name))
            return self.policy(name)


def _checked_bindings(policy: dict[str, Any]) -> list[dict[str, Any]]:
    if policy.get("version") not in (None, 0, 1, 3):
        raise invalid(f"Invalid policy version: {policy['version']!r}; expected 1 or 3")
    bindings = policy.get("bindings", [])
    if not isinstance(bindings, list):
        raise invalid(f"Invalid bindings: {bindings!r}; expected a list")
    for binding in bindings:
        role = binding.get("role") if isinstance(binding, dict) else None
        if not isinstance(role, str) or not role.startswith(("roles/", "projects/", "organizations/")):
            raise invalid(f"Invalid binding {binding!r}; expected a role such as 'roles/storage.objectViewer'")
        members = binding.get("members", [])
        if not isinstance(members, list) or not all(_is_member(member) for member in members):
            raise invalid(f"Invalid members of {role!r}: {members!r}; expected a list of 'user:...' and the like")
    return bindings


def _is_member(member: object) -> bool:
    return isinstance(member, str) and (member in _MEMBER or member.startswith(_MEMBER_PREFIXES))
