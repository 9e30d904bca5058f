"""Compiled workflows: flat code of closures that a `Machine` steps through.

An instruction takes the frame's slots and answers the next instruction's index, or a signal for what it cannot do by
itself (call, return, wait, fork). Code holds no execution's state: a snapshot names instructions and slots by stable
labels, and the same source always compiles to the same labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from ..values import UNSET, Sizer, Value

Slots: TypeAlias = list[Any]
Evaluate: TypeAlias = Callable[[Slots], Value]
Op: TypeAlias = Callable[[Slots], Any]  # -> int, or one of the signals below
Resume: TypeAlias = Callable[[Slots, Value], int]


class Runtime(Protocol):
    """What running code may ask of the execution that it belongs to."""

    sizer: Sizer

    def now(self) -> float: ...
    def get_env(self, name: Value, default: Value) -> Value: ...
    def uuid(self) -> str: ...
    def create_callback(self, method: Value) -> Value: ...
    def log(self, arguments: Mapping[str, Value]) -> None: ...


class CallSignal:
    """Run a subworkflow; its value goes to the calling instruction's `resume`."""

    __slots__ = ("code", "slots")

    def __init__(self, code: Code, slots: Slots) -> None:
        self.code = code
        self.slots = slots


class ReturnSignal:
    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value


class WaitSignal:
    """Stop until something from outside answers; the answer goes to the instruction's `resume`."""

    __slots__ = ("arguments", "call")

    def __init__(self, call: str, arguments: dict[str, Value]) -> None:
        self.call = call
        self.arguments = arguments


class ForkSignal:
    """Run children side by side and wait for all. `items` is None for branches, else what the iterations run over."""

    __slots__ = ("codes", "count", "items", "limit", "start")

    def __init__(
        self, codes: list[Code], count: int, limit: int | None, items: list[Value] | None, start: Value
    ) -> None:
        self.codes = codes
        self.count = count
        self.limit = limit
        self.items = items  # a list, or None when the values count up from `start`
        self.start = start


@dataclass(slots=True)
class Mark:
    """A step (or a part of one) as history and stack traces show it."""

    routine: str
    step: str
    type: str
    parent: int
    line: int
    column: int
    length: int
    cost: int = 1  # billed steps


@dataclass
class Code:
    """A routine's body, or a parallel branch's."""

    key: str
    routine: str
    parameters: list[tuple[str, int, Any]] = field(default_factory=list)  # name, slot, default (REQUIRED for none)
    ops: list[Op] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)  # the mark of the step that each instruction belongs to
    handlers: list[tuple[int, int] | None] = field(default_factory=list)  # where an error goes: instruction, slot
    labels: list[str] = field(default_factory=list)
    resumes: dict[int, Resume] = field(default_factory=dict)
    slot_names: list[str] = field(default_factory=lambda: ["^"])  # slot 0 is the parent's slots
    label_index: dict[str, int] = field(default_factory=dict)
    slot_index: dict[str, int] = field(default_factory=dict)
    value_slot: int = 0  # where a parallel iteration finds its value and index
    index_slot: int = 0

    def new_slots(self, parent: Slots | None = None) -> Slots:
        slots: Slots = [UNSET] * len(self.slot_names)
        slots[0] = parent
        return slots


@dataclass
class Program:
    """A compiled revision. `runtime` is set by whoever runs it, for the time of the run."""

    codes: dict[str, Code]
    marks: list[Mark]
    runtime: Runtime | None = None

    @property
    def main(self) -> Code:
        return self.codes["main"]
