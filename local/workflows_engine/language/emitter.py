"""Appends instructions to a `Code`, with jumps to instructions that follow later."""

from __future__ import annotations

from collections.abc import Callable

from .program import Code, Op, Resume


class Label:
    """The index of an instruction, known after all instructions before it are emitted."""

    __slots__ = ("pc",)

    def __init__(self) -> None:
        self.pc = -1


class Emitter:
    """Builds a Code. `finish` makes the instructions, when every label has its index."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.handler: tuple[Label, int] | None = None
        self.owner = 0  # the mark of the step that owns the next instructions, for stack traces
        self._makers: list[Callable[[], Op]] = []
        self._resumes: dict[int, Callable[[], Resume]] = {}
        self._handlers: list[tuple[Label, int] | None] = []
        self._mark = 0

    def mark(self, mark: int) -> None:
        """Let the next instruction begin a step."""
        self._mark = self.owner = mark

    def place(self, label: Label) -> None:
        """Let a label point to the next instruction."""
        label.pc = len(self._makers)

    def emit(self, label: str, make: Callable[[], Op], resume: Callable[[], Resume] | None = None) -> None:
        """Append an instruction. `finish` calls `make`; `resume` makes the function that takes a signal's answer."""
        code, at = self.code, len(self._makers)
        unique, number = label, 2
        while unique in code.label_index:
            unique, number = f"{label}~{number}", number + 1
        code.label_index[unique] = at
        code.labels.append(unique)
        code.marks.append(self._mark)
        code.owners.append(self.owner)
        self._mark = 0
        self._handlers.append(self.handler)
        self._makers.append(make)
        if resume is not None:
            self._resumes[at] = resume

    def finish(self) -> None:
        code = self.code
        code.ops = [make() for make in self._makers]
        code.handlers = [handler and (handler[0].pc, handler[1]) for handler in self._handlers]
        code.resumes = {at: make() for at, make in self._resumes.items()}
