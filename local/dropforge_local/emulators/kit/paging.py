"""Pages of lists: page sizes, and tokens that name the item after which a page begins (https://google.aip.dev/158)."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dropforge_local.base.errors import ApiError

T = TypeVar("T")


@dataclass(frozen=True)
class Paging:
    """The page sizes of a list: `default` items where a request names no size, never more than `largest`."""

    default: int
    largest: int

    def size(self, wanted: int) -> int:
        """How many items the page has at most. Raises INVALID_ARGUMENT for a negative size."""
        if wanted < 0:
            raise ApiError("INVALID_ARGUMENT", f"page_size is {wanted}; expected 0 or more")
        return min(wanted or self.default, self.largest)

    def page(self, items: Sequence[T], wanted: int, token: str, skip: int = 0) -> tuple[Sequence[T], str]:
        """A page of a list that is in memory, `skip` items after the token, and the next token, "" at the end."""
        size, [first] = self.size(wanted), read_token(token, [0])
        start = max(0, first + skip)
        end = start + size
        return items[start:end], write_token(end) if end < len(items) else ""


def cut(rows: Sequence[T], size: int, key: Callable[[T], Sequence[Any]]) -> tuple[Sequence[T], str]:
    """The first `size` of up to `size + 1` rows; the next page's token, written from the last row's key, or ""."""
    return rows[:size], write_token(*key(rows[size - 1])) if len(rows) > size else ""


def write_token(*key: Any) -> str:
    """The token of the page after the item with this key."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def read_token(token: str, first: Sequence[Any]) -> list[Any]:
    """The key in a token; `first` for no token. Raises INVALID_ARGUMENT unless the key's types are those of `first`."""
    if not token:
        return list(first)
    try:
        key = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
        json.dumps(key, ensure_ascii=False).encode()  # a lone surrogate is no name, and SQLite refuses it
    except (ValueError, RecursionError):
        key = None
    if not isinstance(key, list) or [_type(part) for part in key] != [type(part) for part in first]:
        raise ApiError("INVALID_ARGUMENT", f"page_token {token!r} was not written by this list")
    return key


def _type(part: Any) -> type | None:
    """The type of a part that SQLite can compare; None for an integer beyond 64 bits."""
    return None if isinstance(part, int) and not -(2**63) <= part < 2**63 else type(part)
