"""What happened, as seen from outside: an append-only list of facts, and a digest that two equal lives share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple


class Fact(NamedTuple):
    """Something that was observed: when (seconds since the epoch), what, and its particulars as JSON values."""

    time: float
    kind: str
    data: dict[str, Any]

    def __str__(self) -> str:
        clock = datetime.fromtimestamp(self.time, UTC).strftime("%H:%M:%S.%f")[:-3]
        shown = " ".join(f"{key}={_short(value)}" for key, value in self.data.items())
        return f"{clock} {self.kind:<18} {shown}"


@dataclass
class History:
    """Facts in the order in which they happened. `seed` tells which life this was."""

    seed: int
    facts: list[Fact] = field(default_factory=list)

    def add(self, time: float, kind: str, data: dict[str, Any]) -> None:
        self.facts.append(Fact(time, kind, data))

    def of(self, *kinds: str) -> Iterator[Fact]:
        """The facts of some kinds, in order."""
        return (fact for fact in self.facts if fact.kind in kinds)

    @property
    def digest(self) -> str:
        """SHA-256 over every fact, floats in full."""
        digest = hashlib.sha256()
        for fact in self.facts:
            digest.update(json.dumps(fact, sort_keys=True).encode())
            digest.update(b"\n")
        return digest.hexdigest()


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 160 else f"{text[:157]}..."
