"""The state of a running execution: threads of frames, and parallel steps in progress."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..language.program import Code, Slots
from ..values import Value


class Frame:
    """A running routine or branch: its code, its position, its variables."""

    __slots__ = ("code", "pc", "slots")

    def __init__(self, code: Code, slots: Slots, pc: int = 0) -> None:
        self.code = code
        self.slots = slots
        self.pc = pc

    @property
    def mark(self) -> int:
        """The mark of the step that the frame is in."""
        return self.code.owners[self.pc]


@dataclass
class Join:
    """A parallel step in progress."""

    codes: list[str]
    count: int
    limit: int | None
    items: list[Value] | None
    start: Value
    next: int = 0
    running: int = 0
    errors: list[tuple[int, dict[str, Value]]] = field(default_factory=list)
    failed: int = 0


class Thread:
    """The main thread (id 0), or a parallel branch or iteration."""

    __slots__ = ("branch", "depth", "frames", "id", "is_waiting", "join", "nesting", "parent", "seq")

    def __init__(self, id_: int, parent: int | None, branch: int, frames: list[Frame]) -> None:
        self.id = id_
        self.parent = parent
        self.branch = branch
        self.frames = frames
        self.seq = 0
        self.is_waiting = False
        self.join: Join | None = None
        self.depth = 0  # frames below this thread's own
        self.nesting = 0  # parallel steps around it
