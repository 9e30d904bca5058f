"""Secrets and their versions, in the tables secretmanager_secrets and secretmanager_versions."""

from __future__ import annotations

import re
import sqlite3
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass

from google.cloud import secretmanager_v1 as api
from google.protobuf import timestamp_pb2

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ..kit.rpc import Message
from ..kit.times import seconds_of, timestamp
from .rules import invalid

Secret = api.Secret.pb()
SecretVersion = api.SecretVersion.pb()

SCHEMA = """
CREATE TABLE IF NOT EXISTS secretmanager_secrets (name TEXT PRIMARY KEY, config BLOB NOT NULL, expires REAL);
CREATE TABLE IF NOT EXISTS secretmanager_versions (
    secret TEXT NOT NULL, number INTEGER NOT NULL, config BLOB NOT NULL, payload BLOB,
    PRIMARY KEY (secret, number)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Version:
    """A version as the API describes it, and its value, None once it is destroyed."""

    config: Message
    payload: bytes | None


class Store:
    """Every read deletes the expired secrets first."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        db.connection.executescript(SCHEMA)

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        return self._db.transaction()

    def now(self) -> timestamp_pb2.Timestamp:
        return timestamp(self._clock.now())

    def has_secret(self, name: str) -> bool:
        self._expire()
        return self._db.row("SELECT 1 FROM secretmanager_secrets WHERE name = ?", (name,)) is not None

    def secret(self, name: str) -> Message:
        """Raises NOT_FOUND."""
        self._expire()
        if (row := self._db.row("SELECT config FROM secretmanager_secrets WHERE name = ?", (name,))) is None:
            raise ApiError("NOT_FOUND", f"Secret [{name}] not found.")
        return Secret.FromString(row["config"])

    def secrets(self, parent: str) -> list[Message]:
        """All secrets of a project, by name."""
        self._expire()
        query = "SELECT config FROM secretmanager_secrets WHERE name GLOB ? ORDER BY name"
        return [
            Secret.FromString(row["config"]) for row in self._db.connection.execute(query, (f"{parent}/secrets/*",))
        ]

    def save_secret(self, secret: Message) -> None:
        """Write a secret with a new etag; its ttl becomes the time at which it expires."""
        if secret.WhichOneof("expiration") == "ttl":
            secret.expire_time.CopyFrom(_expiry(self._clock.now() + seconds_of(secret.ttl)))
        expires = seconds_of(secret.expire_time) if secret.HasField("expire_time") else None
        if expires is not None and expires <= self._clock.now():
            raise invalid("the secret's expiration is not in the future")
        secret.etag = _etag()
        self._db.write(
            "INSERT INTO secretmanager_secrets VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "config = excluded.config, expires = excluded.expires",
            (secret.name, secret.SerializeToString(), expires),
        )

    def delete_secret(self, name: str) -> None:
        with self._db.transaction() as sql:
            sql.execute("DELETE FROM secretmanager_versions WHERE secret = ?", (name,))
            sql.execute("DELETE FROM secretmanager_policies WHERE secret = ?", (name,))
            sql.execute("DELETE FROM secretmanager_secrets WHERE name = ?", (name,))

    def version(self, name: str) -> Version:
        """The version by its number, by `latest` (the newest, whatever its state) or by an alias. Raises NOT_FOUND."""
        secret_name, _, wanted = name.rpartition("/versions/")
        secret = self.secret(secret_name)
        if wanted == "latest":
            version = self.newest_version(secret_name)
        elif re.fullmatch(r"[1-9][0-9]{0,17}", wanted):
            version = self.find_version(secret_name, int(wanted))
        else:
            version = self.find_version(secret_name, dict(secret.version_aliases).get(wanted, 0))
        if version is None:
            raise ApiError("NOT_FOUND", f"Secret Version [{name}] not found or has no versions.")
        return version

    def find_version(self, secret: str, number: int) -> Version | None:
        versions = self._versions("secret = ? AND number = ?", secret, number)
        return versions[0] if versions else None

    def newest_version(self, secret: str) -> Version | None:
        versions = self._versions("secret = ? ORDER BY number DESC LIMIT 1", secret)
        return versions[0] if versions else None

    def versions(self, secret: str) -> list[Message]:
        """All versions of a secret, newest first."""
        return [version.config for version in self._versions("secret = ? ORDER BY number DESC", secret)]

    def add_version(self, secret: str, version: Message, payload: bytes) -> None:
        """Name the version by the next number and write it."""
        newest = self.newest_version(secret)
        number = 1 + _number(newest.config) if newest else 1
        version.name = f"{secret}/versions/{number}"
        version.etag = _etag()
        row = (secret, number, version.SerializeToString(), payload)
        self._db.write("INSERT INTO secretmanager_versions VALUES (?, ?, ?, ?)", row)

    def save_version(self, version: Message, payload: bytes | None) -> None:
        """Write a version that changed, with a new etag."""
        version.etag = _etag()
        secret = version.name.rpartition("/versions/")[0]
        self._db.write(
            "UPDATE secretmanager_versions SET config = ?, payload = ? WHERE secret = ? AND number = ?",
            (version.SerializeToString(), payload, secret, _number(version)),
        )

    def _versions(self, where: str, *values: object) -> list[Version]:
        rows = self._db.rows(f"SELECT * FROM secretmanager_versions WHERE {where}", values)
        return [Version(SecretVersion.FromString(row["config"]), row["payload"]) for row in rows]

    def _expire(self) -> None:
        query = "SELECT name FROM secretmanager_secrets WHERE expires <= ?"
        for row in self._db.rows(query, (self._clock.now(),)):
            self.delete_secret(row["name"])


def _number(version: Message) -> int:
    return int(version.name.rpartition("/")[2])


def _etag() -> str:
    return f'"{uuid.uuid4().hex[:14]}"'


def _expiry(when: float) -> timestamp_pb2.Timestamp:
    try:
        return timestamp(when)
    except (ValueError, OverflowError) as error:
        raise invalid(f"the secret's expiration is out of range: {error}") from error
