"""Counts the answers of the revisions of services, in memory: a new stack begins with no answer."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

KEPT = 100_000  # requests of a revision


class Answered(NamedTuple):
    """A request: when it was answered (seconds since the epoch), with which HTTP status, after how many seconds."""

    time: float
    status: int
    seconds: float


class Counts:
    """Requests by the full resource name of the revision that answered them."""

    def __init__(self) -> None:
        self._answered: defaultdict[str, deque[Answered]] = defaultdict(lambda: deque(maxlen=KEPT))

    def add(self, revision: str, answered: Answered) -> None:
        self._answered[revision].append(answered)

    def between(self, start: float, end: float) -> Iterator[tuple[str, list[Answered]]]:
        """Each revision with its requests in an interval."""
        for revision, requests in self._answered.items():
            yield revision, [each for each in requests if start <= each.time <= end]
