"""Scopes of variables: a routine is a scope, and so is every `for`, `except` and parallel body inside it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .program import Code


@dataclass
class Scope:
    """A set of variables in the slots of `code`. `boundary` marks a parallel branch or iteration."""

    code: Code
    path: str
    parent: Scope | None = None
    boundary: bool = False
    shared: frozenset[str] = frozenset()
    names: dict[str, int] = field(default_factory=dict)

    def declare(self, name: str) -> int:
        """The slot of a variable of this scope; makes the slot of a new variable."""
        if name not in self.names:
            self.names[name] = new_slot(self.code, f"{self.path}:{name}" if self.path else name)
        return self.names[name]

    def find(self, name: str) -> tuple[int, int] | None:
        """(parallel boundaries to cross, slot) of the variable that `name` refers to in this scope, or None."""
        scope: Scope | None = self
        depth = 0
        while scope is not None:
            if name in scope.names:
                return depth, scope.names[name]
            depth += scope.boundary
            scope = scope.parent
        return None

    def crosses_unshared(self, name: str) -> bool:
        """True if an assignment to `name` changes a variable outside a parallel step that does not share it."""
        scope: Scope | None = self
        while scope is not None and name not in scope.names:
            if scope.boundary and name not in scope.shared:
                return scope.parent is not None and scope.parent.find(name) is not None
            scope = scope.parent
        return False


def new_slot(code: Code, name: str) -> int:
    """A new slot; its name is unique in the code and the same at every compilation."""
    unique, number = name, 2
    while unique in code.slot_index:
        unique, number = f"{name}~{number}", number + 1
    code.slot_index[unique] = len(code.slot_names)
    code.slot_names.append(unique)
    return code.slot_index[unique]
