"""A bounded memory of what this process has done already."""

from __future__ import annotations

from collections import OrderedDict

LIMIT = 1024


class Once:
    """A set of keys that forgets the oldest key when it is full. Its methods are atomic."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._keys: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str) -> None:
        """Remember a key."""
        self._keys[key] = None
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)
