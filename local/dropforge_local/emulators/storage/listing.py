"""Listing objects by prefix, delimiter, offsets and glob; each step is a seek in the (bucket, name) index."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass, field

import re2

from dropforge_local.base.db import Database

from .errors import invalid
from .models import StoredObject

# Rows after a position in (name, generation); the partial index on live objects serves the first form.
_LIVE = "SELECT * FROM storage_objects WHERE bucket = ? AND live = 1 AND name >= ? ORDER BY name"
_VERSIONS = (
    "SELECT * FROM storage_objects WHERE bucket = ? AND name >= ? AND (name > ? OR generation > ?) "
    "ORDER BY name, generation"
)


@dataclass(frozen=True)
class ListRequest:
    """The parameters of objects.list."""

    bucket: str
    prefix: str = ""
    delimiter: str = ""
    start: str = ""
    end: str = ""
    glob: str = ""
    versions: bool = False
    trailing_delimiter: bool = False
    limit: int = 1000
    page_token: str = ""


@dataclass
class Page:
    """One page: objects and common prefixes, together at most `limit`."""

    items: list[StoredObject] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    next_token: str | None = None

    def __len__(self) -> int:
        return len(self.items) + len(self.prefixes)


@dataclass(frozen=True)
class _Position:
    """Where a listing goes on: at `name`, with generations above `generation`."""

    name: str
    generation: int = 0

    def to_token(self) -> str:
        return base64.urlsafe_b64encode(f"{self.generation}:{self.name}".encode()).decode()

    @classmethod
    def from_token(cls, token: str) -> _Position:
        try:
            generation, _, name = base64.b64decode(token, altchars=b"-_", validate=True).decode().partition(":")
            return cls(name, int(generation[:19]))
        except (binascii.Error, ValueError):
            raise invalid(f"Invalid pageToken: {token!r}; expected the nextPageToken of an earlier page") from None


def list_objects(db: Database, request: ListRequest) -> Page:
    """One page of a listing, in the order of the names' UTF-8 bytes."""
    page = Page()
    matches = _Matcher(request.glob)
    position: _Position | None = _Position(max(request.prefix, request.start))
    if request.page_token:
        position = _Position.from_token(request.page_token)
    while position is not None:
        position = _take_until_group(db, request, matches, position, page)
    return page


def _take_until_group(
    db: Database, request: ListRequest, matches: _Matcher, position: _Position, page: Page
) -> _Position | None:
    """Add objects to the page until a common prefix, which is added and seeked over; None when the page is done."""
    for stored in _rows(db, request, position):
        name = stored.name
        if not name.startswith(request.prefix) or (request.end and name >= request.end):
            return None
        if len(page) >= request.limit:
            page.next_token = position.to_token()
            return None
        group = _group(name, request)
        if (group is None or (request.trailing_delimiter and name == group)) and matches(name):
            page.items.append(stored)
        if group is not None:
            if matches(group):
                page.prefixes.append(group)
            after = _first_after(group)
            return None if after is None else _Position(after)
        position = _Position(name, stored.generation) if request.versions else _Position(name + "\0")
    return None


def _rows(db: Database, request: ListRequest, position: _Position) -> Iterator[StoredObject]:
    if request.versions:
        values: tuple[object, ...] = (request.bucket, position.name, position.name, position.generation)
        cursor = db.connection.execute(_VERSIONS, values)
    else:
        cursor = db.connection.execute(_LIVE, (request.bucket, position.name))
    return map(StoredObject.from_row, cursor)


def _group(name: str, request: ListRequest) -> str | None:
    """The common prefix that `name` belongs to, if the delimiter occurs after the prefix."""
    if not request.delimiter:
        return None
    found = name.find(request.delimiter, len(request.prefix))
    return None if found < 0 else name[: found + len(request.delimiter)]


def _first_after(prefix: str) -> str | None:
    """The least string above every string that begins with `prefix`; None if there is none."""
    trimmed = prefix.rstrip("\U0010ffff")
    if not trimmed:
        return None
    successor = ord(trimmed[-1]) + 1
    # Surrogates are not characters; SQLite compares UTF-8 bytes, which sort like code points.
    return trimmed[:-1] + chr(0xE000 if successor == 0xD800 else successor)


class _Matcher:
    """A matchGlob, compiled for RE2: patterns come from callers, and must not stall the event loop."""

    def __init__(self, glob: str) -> None:
        try:
            self._pattern = re2.compile(_glob_to_regex(glob)) if glob else None
        except re2.error as error:
            raise invalid(f"Invalid matchGlob: {glob!r}: {error}") from None

    def __call__(self, name: str) -> bool:
        return self._pattern is None or self._pattern.fullmatch(name) is not None


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
