"""Where the compiler is in the source: the variables it sees, and the steps it may jump to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .emitter import Label
from .scopes import Scope


@dataclass(frozen=True)
class Jumps:
    """The targets of `next`: the steps of this list, then the steps of the lists around it."""

    names: Mapping[str, Label]
    outer: Jumps | None
    end: Label
    break_: Label | None = None
    continue_: Label | None = None

    def find(self, name: str) -> Label | None:
        jumps: Jumps | None = self
        while jumps is not None:
            if name in jumps.names:
                return jumps.names[name]
            jumps = jumps.outer
        return None


@dataclass(frozen=True)
class Place:
    """The surroundings of the code that the compiler emits."""

    scope: Scope
    jumps: Jumps
    step: str
    path: str
    mark: int
    in_branch: bool = False
