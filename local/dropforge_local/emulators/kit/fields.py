"""Partial responses: the parts of a resource that the system parameter `fields` selects.

https://cloud.google.com/storage/docs/json_api#partial-response: `items(name,size),nextPageToken`, `items/name`, `*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TOKEN = re.compile(r"[A-Za-z0-9_.$-]+|\*|[(),/]")
Selection = dict[str, "Selection"]
"""The selected fields by name, each with what is selected in it; {} selects all of it."""


def select(value: Any, fields: str) -> Any:
    """The selected parts of a resource, or of each element of a list. Raises ValueError for a malformed selection."""
    return _pick(value, read_selection(fields))


def read_selection(fields: str) -> Selection:
    """The fields that `fields` selects. Raises ValueError if it is malformed."""
    tokens = _TOKEN.findall(fields)
    try:
        selection, end = _read_list(iter(tokens))
    except ValueError:
        end = "malformed"
    if end or "".join(tokens) != fields:
        raise ValueError(f"Invalid field selection {fields}")
    return selection


def _read_list(tokens: Iterator[str]) -> tuple[Selection, str]:
    """The selection up to its end, and the token that ends it: `)`, or "" at the end of the text."""
    selection: Selection = {}
    while (end := _read_path(tokens, selection)) == ",":
        pass
    return selection, end


def _read_path(tokens: Iterator[str], selection: Selection) -> str:
    """Add a path to the selection; return the token after it."""
    name = next(tokens, "")
    if name in ("", "(", ")", ",", "/"):
        raise ValueError(f"{name!r} is not a field")
    below = selection.setdefault(name, {})
    following = next(tokens, "")
    if following == "/":
        return _read_path(tokens, below)
    if following == "(":
        inner, end = _read_list(tokens)
        if end != ")":
            raise ValueError(f"{name!r} has no )")
        below.update(inner)
        following = next(tokens, "")
    return following


def _pick(value: Any, selection: Selection) -> Any:
    if not selection:
        return value
    if isinstance(value, list):
        return [_pick(item, selection) for item in value]
    if not isinstance(value, dict):
        return value
    everything = selection.get("*")
    picked = value.items() if everything is not None else [pair for pair in value.items() if pair[0] in selection]
    return {name: _pick(item, selection.get(name, everything or {})) for name, item in picked}
