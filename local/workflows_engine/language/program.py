"""Compiled workflows: flat code of closures that a `Machine` steps through.

An instruction takes the frame's slots. It returns the index of the next instruction, or a signal for the machine: call,
return, wait, fork. Code holds no state of an execution. A snapshot names instructions and slots by labels, and the same
source always compiles to the same labels.
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
    """The functions that running code calls on its execution."""

    sizer: Sizer
    room: int  # bytes that variables may still grow by before they are counted

    def now(self) -> float: ...
    def get_env(self, name: Value, default: Value) -> Value: ...
    def uuid(self) -> str: ...
    def create_callback(self, method: Value) -> Value: ...
    def log(self, arguments: Mapping[str, Value]) -> None: ...
    def count_variables(self) -> None: ...


class CallSignal:
    """Run a subworkflow. The instruction's `resume` receives the subworkflow's value."""

    __slots__ = ("code", "slots")

    def __init__(self, code: Code, slots: Slots) -> None:
        self.code = code
        self.slots = slots


class ReturnSignal:
    """End the frame with a value."""

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value


class WaitSignal:
    """Wait for an answer from outside. The instruction's `resume` receives the answer."""

    __slots__ = ("arguments", "call")

    def __init__(self, call: str, arguments: dict[str, Value]) -> None:
        self.call = call
        self.arguments = arguments


class ForkSignal:
    """Run branches or iterations side by side, and wait for all of them.

    `items` is the list of an iteration; None for branches, and for a range, whose values count up from `start`.
    """

    __slots__ = ("codes", "count", "items", "limit", "start")

    def __init__(
        self, codes: list[Code], count: int, limit: int | None, items: list[Value] | None, start: Value
    ) -> None:
        self.codes = codes
        self.count = count
        self.limit = limit
        self.items = items
        self.start = start


@dataclass(slots=True)
class Mark:
    """A step, or a part of a step, as history and stack traces show it. `parent` is the mark around it."""

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
    """The body of a routine or of a parallel branch."""

    key: str
    routine: str
    parameters: list[tuple[str, int, Any]] = field(default_factory=list)  # name, slot, default or REQUIRED
    ops: list[Op] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)  # the mark of the step that each instruction belongs to
    handlers: list[tuple[int, int] | None] = field(default_factory=list)  # of errors: instruction, slot of the error
    labels: list[str] = field(default_factory=list)
    resumes: dict[int, Resume] = field(default_factory=dict)
    slot_names: list[str] = field(default_factory=lambda: ["^"])  # slot 0 is the parent's slots
    label_index: dict[str, int] = field(default_factory=dict)
    slot_index: dict[str, int] = field(default_factory=dict)
    value_slot: int = 0  # of a parallel iteration's value and index; 0 for none
    index_slot: int = 0

    def new_slots(self, parent: Slots | None = None) -> Slots:
        slots: Slots = [UNSET] * len(self.slot_names)
        slots[0] = parent
        return slots


@dataclass
class Program:
    """A compiled revision. A machine sets `runtime` to itself before it runs the code."""

    codes: dict[str, Code]
    marks: list[Mark]
    runtime: Runtime | None = None

    @property
    def main(self) -> Code:
        return self.codes["main"]
