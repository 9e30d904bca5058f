"""The history of a life: an append-only list of facts that are visible from outside, with a digest to compare lives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple


class Fact(NamedTuple):
    """An observation: its time (seconds since the epoch), its kind, and its details as JSON values."""

    time: float
    kind: str
    data: dict[str, Any]

    def __str__(self) -> str:
        clock = datetime.fromtimestamp(self.time, UTC).strftime("%H:%M:%S.%f")[:-3]
        shown = " ".join(f"{key}={_short(value)}" for key, value in self.data.items())
        return f"{clock} {self.kind:<18} {shown}"


@dataclass
class History:
    """Facts in the order in which they happened, in the life of `seed`."""

    seed: int
    facts: list[Fact] = field(default_factory=list)

    def add(self, time: float, kind: str, data: dict[str, Any]) -> None:
        self.facts.append(Fact(time, kind, data))

    def of(self, *kinds: str) -> Iterator[Fact]:
        """The facts of the given kinds, in order."""
        return (fact for fact in self.facts if fact.kind in kinds)

    @property
    def digest(self) -> str:
        """SHA-256 over every fact, with floats in full precision."""
        digest = hashlib.sha256()
        for fact in self.facts:
            digest.update(json.dumps(fact, sort_keys=True).encode())
            digest.update(b"\n")
        return digest.hexdigest()


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 160 else f"{text[:157]}..."
