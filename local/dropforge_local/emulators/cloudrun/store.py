"""The tables: resources as serialised messages, and the facts that the messages have no fields for."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from typing import Any

from google.cloud import run_v2

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ..kit.paging import Paging, cut, read_token

SCHEMA = """
CREATE TABLE IF NOT EXISTS cloudrun_resources (
  name TEXT PRIMARY KEY, kind TEXT NOT NULL, parent TEXT NOT NULL, created REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS cloudrun_resources_by_parent ON cloudrun_resources (kind, parent, created, name);
CREATE TABLE IF NOT EXISTS cloudrun_tokens (
  job_uid TEXT NOT NULL, token TEXT NOT NULL, execution TEXT NOT NULL, PRIMARY KEY (job_uid, token)
);
CREATE TABLE IF NOT EXISTS cloudrun_stops (execution TEXT PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS cloudrun_containers (
  id TEXT PRIMARY KEY, resource TEXT NOT NULL, started REAL NOT NULL, port INTEGER, ended INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS cloudrun_containers_by_resource ON cloudrun_containers (resource);
CREATE TABLE IF NOT EXISTS cloudrun_ports (
  service TEXT NOT NULL, tag TEXT NOT NULL, port INTEGER NOT NULL UNIQUE, PRIMARY KEY (service, tag)
);
CREATE TABLE IF NOT EXISTS cloudrun_settings (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""

TYPES: dict[str, Any] = {
    "jobs": run_v2.Job,
    "executions": run_v2.Execution,
    "tasks": run_v2.Task,
    "services": run_v2.Service,
    "revisions": run_v2.Revision,
}
PAGES = Paging(default=100, largest=1000)


class Store:
    """Resources by name; the kind is the name's second to last segment. Call inside a transaction to write."""

    def __init__(self, db: Database) -> None:
        self.db = db
        db.connection.executescript(SCHEMA)

    def find(self, name: str) -> Any | None:
        """A copy of the resource, or None."""
        row = self.db.row("SELECT body FROM cloudrun_resources WHERE name = ?", [name])
        return TYPES[kind_of(name)].deserialize(row["body"]) if row else None

    def get(self, name: str) -> Any:
        """Like `find`, but NOT_FOUND."""
        if (resource := self.find(name)) is None:
            _, project, _, region, *_ = name.split("/")
            kind = kind_of(name).removesuffix("s").upper()
            raise ApiError(
                "NOT_FOUND",
                f"Resource {short(name)!r} of kind {kind!r} in region {region!r} in project {project!r}"
                " does not exist.",
            )
        return resource

    def put(self, resource: Any, created: float = 0.0) -> None:
        """Write a resource, new or not; `created` orders the listing and counts only for a new resource."""
        resource.etag = etag_of(resource)
        body = type(resource).serialize(resource)
        self.db.write(
            "INSERT INTO cloudrun_resources VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET body = ?",
            [resource.name, kind_of(resource.name), parent_of(resource.name), created, body, body],
        )

    def delete(self, name: str) -> None:
        """Delete a resource and all resources below it."""
        self.db.write(
            "DELETE FROM cloudrun_resources WHERE name = ? OR name >= ? AND name < ?", [name, f"{name}/", f"{name}0"]
        )

    def children(self, kind: str, parent: str) -> list[Any]:
        """Oldest first."""
        rows = self.db.rows(
            "SELECT body FROM cloudrun_resources WHERE kind = ? AND parent = ? ORDER BY created, rowid", [kind, parent]
        )
        return [TYPES[kind].deserialize(row["body"]) for row in rows]

    def all(self, kind: str) -> list[Any]:
        rows = self.db.rows("SELECT body FROM cloudrun_resources WHERE kind = ? ORDER BY created", [kind])
        return [TYPES[kind].deserialize(row["body"]) for row in rows]

    def names(self) -> list[str]:
        """The names of all jobs, executions and services."""
        kinds = ("jobs", "executions", "services")
        rows = self.db.rows("SELECT name FROM cloudrun_resources WHERE kind IN (?, ?, ?) ORDER BY name", kinds)
        return [row["name"] for row in rows]

    def ports(self) -> list[int]:
        """The ports of the services."""
        return [int(row["port"]) for row in self.db.rows("SELECT port FROM cloudrun_ports")]

    def page(self, kind: str, parent: str, size: int, token: str) -> tuple[list[Any], str]:
        """A page, newest first, and the next page's token; "-" in the parent stands for any segment."""
        size = PAGES.size(size)
        pattern = "/".join("*" if part == "-" else part for part in parent.split("/"))
        rows = self.db.rows(
            "SELECT rowid, body FROM cloudrun_resources WHERE kind = ? AND parent GLOB ? AND rowid < ?"
            " ORDER BY rowid DESC LIMIT ?",
            [kind, pattern, *read_token(token, [2**62]), size + 1],
        )
        page, following = cut(rows, size, lambda row: [row["rowid"]])
        return [TYPES[kind].deserialize(row["body"]) for row in page], following

    def setting(self, key: str, default: Any) -> Any:
        row = self.db.row("SELECT value FROM cloudrun_settings WHERE key = ?", [key])
        return json.loads(row["value"]) if row else default

    def set_setting(self, key: str, value: Any) -> None:
        self.db.write("INSERT OR REPLACE INTO cloudrun_settings VALUES (?, ?)", [key, json.dumps(value)])


def kind_of(name: str) -> str:
    return name.split("/")[-2]


def parent_of(name: str) -> str:
    return name.rsplit("/", 2)[0]


def short(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def place_of(name: str) -> tuple[str, str]:
    """(project, region) of a resource name."""
    _, project, _, region, *_ = name.split("/")
    return project, region


def new_uid() -> str:
    return str(uuid.uuid4())


def etag_of(resource: Any) -> str:
    """Changes with the desired state but not with the status, so that status changes break no read-modify-write."""
    digest = hashlib.sha256(f"{resource.uid}/{resource.generation}".encode()).digest()[:9]
    return f'"{base64.urlsafe_b64encode(digest).decode()}"'


def check_etag(given: str, resource: Any) -> None:
    """Raise ABORTED if the client read another version of the resource."""
    if given and given != resource.etag:
        raise ApiError("ABORTED", f"etag is {given}; expected {resource.etag} of {resource.name!r}: read it again")
