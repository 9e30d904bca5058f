"""Protobuf messages of one kind, kept as JSON in a table of their own."""

from __future__ import annotations

import sqlite3
from functools import lru_cache
from typing import Any

from google.protobuf import json_format

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from .names import parent_pattern
from .paging import Paging, cut, read_token


class Messages:
    """Messages by full resource name (PARENT/KIND/ID).

    `columns` declares further columns of the table, for facts that the message has no field for.
    """

    def __init__(
        self,
        db: Database,
        table: str,
        message: Any,
        *,
        columns: str = "",
        not_found: str = "Resource '{name}' was not found",
        paging: Paging = Paging(default=100, largest=1000),  # noqa: B008 - frozen
    ) -> None:
        self._db = db
        self._table = table
        self._message = message
        self._not_found = not_found
        self._paging = paging
        db.connection.execute(
            f"CREATE TABLE IF NOT EXISTS {table} (name TEXT PRIMARY KEY, parent TEXT NOT NULL, created REAL NOT NULL, "
            f"{columns + ', ' if columns else ''}body TEXT NOT NULL)"
        )

    def find(self, name: str) -> Any | None:
        row = self.row(name)
        return self._parse(row) if row else None

    def get(self, name: str) -> Any:
        """Raises ApiError NOT_FOUND."""
        if (message := self.find(name)) is None:
            raise ApiError("NOT_FOUND", self._not_found.format(name=name))
        return message

    def row(self, name: str) -> sqlite3.Row | None:
        """All columns of a resource."""
        return self._db.row(f"SELECT * FROM {self._table} WHERE name = ?", [name])

    def add(self, name: str, message: Any, created: float, **columns: Any) -> None:
        """Write a new resource."""
        values = {"name": name, "parent": name.rsplit("/", 2)[0], "created": created, **columns, "body": _dump(message)}
        self._db.write(
            f"INSERT INTO {self._table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})",
            list(values.values()),
        )

    def put(self, name: str, message: Any, **columns: Any) -> None:
        """Write an existing resource, and further columns of it."""
        self.set(name, body=_dump(message), **columns)

    def set(self, name: str, **columns: Any) -> None:
        """Write further columns of a resource."""
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self._db.write(f"UPDATE {self._table} SET {assignments} WHERE name = ?", [*columns.values(), name])

    def delete(self, name: str) -> None:
        self._db.write(f"DELETE FROM {self._table} WHERE name = ?", [name])

    def page(self, request: Any) -> tuple[list[Any], str]:
        """A page of `list` for a List request, and the next page's token. Changes between pages move no message."""
        size = self._paging.size(request.page_size)
        rows = self._db.rows(
            f"SELECT created, name, body FROM {self._table} WHERE parent GLOB ? AND (created, name) > (?, ?)"
            " ORDER BY created, name LIMIT ?",
            [parent_pattern(request.parent), *read_token(request.page_token, [0.0, ""]), size + 1],
        )
        page, token = cut(rows, size, lambda row: [row["created"], row["name"]])
        return [self._parse(row) for row in page], token

    def list(self, parent: str = "*") -> list[Any]:
        """The messages of one location, of all locations of a project for "-", or of all projects; oldest first."""
        rows = self._db.rows(
            f"SELECT body FROM {self._table} WHERE parent GLOB ? ORDER BY created, name", [parent_pattern(parent)]
        )
        return [self._parse(row) for row in rows]

    def _parse(self, row: sqlite3.Row) -> Any:
        message = self._message()
        message.CopyFrom(_parsed(self._message, row["body"]))
        return message


@lru_cache(256)
def _parsed(message: Any, text: str) -> Any:
    """The message in a row: clients look at the same resource again and again, and JSON takes 100 times a copy."""
    return json_format.Parse(text, message())


def _dump(message: Any) -> str:
    text: str = json_format.MessageToJson(message, indent=None)
    return text
