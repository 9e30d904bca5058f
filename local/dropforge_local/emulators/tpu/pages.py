"""Pages of lists: how many items `page_size` asks for, and tokens that say after which item a list goes on.

https://google.aip.dev/158. Cloud TPU documents neither its default nor its largest page; these are ours.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, TypeVar

from dropforge_local.base.errors import ApiError

T = TypeVar("T")

DEFAULT_PAGE, LARGEST_PAGE = 100, 1000


def size_of(request: Any) -> int:
    """How many items a page has at most."""
    if request.page_size < 0:
        raise ApiError("INVALID_ARGUMENT", f"page_size is {request.page_size}; expected 0 or more")
    return min(request.page_size or DEFAULT_PAGE, LARGEST_PAGE)


def write_token(*key: Any) -> str:
    """A token for the page after the item with this key."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def read_token(request: Any, first: Sequence[Any]) -> list[Any]:
    """The key that a request's token was written with, of as many parts and kinds as `first`, which is without one."""
    if not request.page_token:
        return list(first)
    try:
        key = json.loads(base64.urlsafe_b64decode(request.page_token))
    except ValueError:
        key = None
    if not isinstance(key, list) or [type(part) for part in key] != [type(part) for part in first]:
        message = f"page_token {request.page_token!r} is not one that this list has given"
        raise ApiError("INVALID_ARGUMENT", message)
    return key


def page_of(items: Sequence[T], request: Any) -> tuple[Sequence[T], str]:
    """A page of what never changes, and the token of the next one."""
    size, [start] = size_of(request), read_token(request, [0])
    end = max(0, start) + size
    return items[max(0, start) : end], write_token(end) if end < len(items) else ""
