"""Listing objects by prefix, delimiter, offsets and glob; every step seeks in the (bucket, name) index."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import re2

from dropforge_local.base.db import Database

from ..kit.paging import write_token
from .errors import invalid, not_emulated
from .wire import read_token

# Rows after a position in (name, generation).
_LIVE = "SELECT {columns} FROM storage_objects WHERE bucket = ? AND live = 1 AND name >= ?"
_VERSIONS = (
    "SELECT {columns} FROM storage_objects WHERE bucket = ? AND name >= ? AND (name > ? OR generation > ?) "
    "ORDER BY name, generation"
)
Item = dict[str, Any]


@dataclass
class Page:
    """One page: objects and common prefixes, together at most the limit."""

    items: list[Item] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    next_token: str = ""

    def __len__(self) -> int:
        return len(self.items) + len(self.prefixes)


@dataclass(frozen=True)
class _Position:
    """Where a listing continues: at `name`, with generations above `generation`."""

    name: str
    generation: int = 0


@dataclass(frozen=True)
class Shape:
    """The columns that a listing reads, with name and generation among them, and the item of a row."""

    columns: str
    item: Callable[[sqlite3.Row], Item]


def list_objects(db: Database, bucket: str, query: Mapping[str, str], limit: int, shape: Shape) -> Page:
    """One page of objects.list, in the order of the names' UTF-8 bytes."""
    listing = _Listing(db, bucket, query, limit, shape)
    name, generation = read_token(query, max(listing.prefix, query.get("startOffset", "")), 0)
    position: _Position | None = _Position(name, generation)
    while position is not None:
        position = listing.take_group(position)
    return listing.page


def flag(query: Mapping[str, str], parameter: str) -> bool:
    """google-cloud-storage writes a true boolean as True, other clients as true."""
    return query.get(parameter, "").lower() == "true"


class _Listing:
    """The parameters of objects.list and the page that they fill."""

    def __init__(self, db: Database, bucket: str, query: Mapping[str, str], limit: int, shape: Shape) -> None:
        if flag(query, "softDeleted"):
            raise not_emulated("softDeleted (the soft delete policy of local buckets is 0 seconds)")
        self.page = Page()
        self.prefix = query.get("prefix", "")
        self._db = db
        self._bucket = bucket
        self._limit = limit
        self._shape = shape
        self._end = query.get("endOffset", "")
        self._delimiter = query.get("delimiter", "")
        self._trailing_delimiter = flag(query, "includeTrailingDelimiter")
        self._versions = flag(query, "versions")
        glob = query.get("matchGlob", "")
        self._matches = _Matcher(glob)
        # With a delimiter, the glob also matches common prefixes, which are no names of rows.
        self._coarse = _coarse(glob) if glob and not self._delimiter else ""

    def take_group(self, position: _Position) -> _Position | None:
        """Add objects up to and with the next common prefix; return the position after it, None if the page is done."""
        for row in self._rows(position):
            name, generation = row["name"], row["generation"]
            if not name.startswith(self.prefix) or (self._end and name >= self._end):
                return None
            if len(self.page) >= self._limit:
                self.page.next_token = write_token(position.name, position.generation)
                return None
            group = self._group(name)
            if (group is None or (self._trailing_delimiter and name == group)) and self._matches(name):
                self.page.items.append(self._shape.item(row))
            if group is not None:
                if self._matches(group):
                    self.page.prefixes.append(group)
                after = _first_after(group)
                return None if after is None else _Position(after)
            position = _Position(name, generation) if self._versions else _Position(name + "\0")
        return None

    def _rows(self, position: _Position) -> Iterable[sqlite3.Row]:
        columns = self._shape.columns
        if self._versions:
            values: tuple[object, ...] = (self._bucket, position.name, position.name, position.generation)
            return self._db.connection.execute(_VERSIONS.format(columns=columns), values)
        query, values = _LIVE.format(columns=columns), (self._bucket, position.name)
        for condition, value in ((" AND name < ?", _first_after(self.prefix)), (" AND name GLOB ?", self._coarse)):
            if value:
                query, values = query + condition, (*values, value)
        return self._db.connection.execute(f"{query} ORDER BY name", values)

    def _group(self, name: str) -> str | None:
        """The common prefix of `name`, if the delimiter occurs after the prefix."""
        if not self._delimiter:
            return None
        start = name.find(self._delimiter, len(self.prefix))
        return None if start < 0 else name[: start + len(self._delimiter)]


def _first_after(prefix: str) -> str | None:
    """The least string above every string that begins with `prefix`; None if there is none."""
    trimmed = prefix.rstrip("\U0010ffff")
    if not trimmed:
        return None
    successor = ord(trimmed[-1]) + 1
    # Surrogates are not characters. SQLite compares UTF-8 bytes, which sort like code points.
    return trimmed[:-1] + chr(0xE000 if successor == 0xD800 else successor)


class _Matcher:
    """A matchGlob, compiled for RE2, which no pattern of a caller can make slow: it runs on the event loop."""

    def __init__(self, glob: str) -> None:
        # With a single `*`, which takes no slash, two comparisons do: a listing of thousands takes half the time.
        self._ends = tuple(glob.split("*")) if re.fullmatch(r"[^*?\[\]{},\\]*\*[^*?\[\]{},\\]*", glob) else None
        try:
            self._pattern = re2.compile(_glob_to_regex(glob)) if glob else None
        except re2.error as error:
            raise invalid(f"Invalid matchGlob: {glob!r}: {error}") from None

    def __call__(self, name: str) -> bool:
        if self._ends is not None:
            first, last = self._ends
            middle = name[len(first) : len(name) - len(last)]
            return name == f"{first}{middle}{last}" and "/" not in middle
        return self._pattern is None or self._pattern.fullmatch(name) is not None


def _coarse(glob: str) -> str:
    """A pattern of SQLite's GLOB with a single `*`, which takes every name that the glob matches, and more.

    SQLite skips the objects beside the wanted ones without a row in Python. A single `*` is never slow.
    """
    literals = re.split(r"[*?\[\]{},\\]", glob)
    return glob if len(literals) == 1 else f"{literals[0]}*{literals[-1]}"


def _glob_to_regex(glob: str) -> str:
    """`*` and `?` do not cross '/', `**` does; `[...]` and `{a,b}` as in a shell."""
    pieces = []
    depth = 0
    position = 0
    while position < len(glob):
        character = glob[position]
        position += 1
        if character == "*" and glob[position : position + 1] == "*":
            pieces.append("(?s:.*)")
            position += 1
        elif character == "[" and (end := glob.find("]", position + 1)) > 0:
            pieces.append(_class_to_regex(glob[position:end]))
            position = end + 1
        elif character == "{":
            pieces.append("(?:")
            depth += 1
        elif character == "}" and depth:
            pieces.append(")")
            depth -= 1
        elif character == "," and depth:
            pieces.append("|")
        elif character == "\\" and position < len(glob):
            pieces.append(re2.escape(glob[position]))
            position += 1
        else:
            pieces.append({"*": "[^/]*", "?": "[^/]"}.get(character) or re2.escape(character))
    return "".join(pieces)


def _class_to_regex(members: str) -> str:
    negated = members[:1] in ("!", "^")
    escaped = members[negated:].replace("\\", "\\\\").replace("[", "\\[").replace("^", "\\^")
    return f"[{'^/' if negated else ''}{escaped}]"
