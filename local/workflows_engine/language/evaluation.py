"""Compiles expression trees to closures over a frame's slots, so that a running workflow walks no tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import decisions
from ..errors import WorkflowError, system_error
from ..values import INT_MAX, INT_MIN, UNSET, Value
from .expressions import Binary, Call, Expression, Field, Index, ListOf, Literal, Logical, Name, Unary
from .operators import OPERATORS, get_field, get_index, negate, truth
from .program import Evaluate, Slots

_CHECKED = frozenset((list, dict, str, bytes))


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot that an earlier instruction has filled; it replaces a hoisted call in an expression."""

    slot: int
    depth: int = 1


Tree = Expression | Slot
Resolve = Callable[[str], "tuple[int, int] | Literal"]  # a name to its (depth, slot), or to a constant
Function = Callable[[str], Callable[..., Value]]  # the name of a library function to the function


class Evaluation:
    """Compiles the trees at a place in the source: `resolve` knows its variables, `function` the library."""

    def __init__(self, resolve: Resolve, function: Function) -> None:
        self._resolve = resolve
        self._function = function

    def compile(self, tree: Tree) -> Evaluate:
        if isinstance(tree, Literal):
            return constant(tree.value)
        if isinstance(tree, Slot):
            return _local(tree.slot, "")
        if isinstance(tree, Name):
            return self._name(tree.name)
        if isinstance(tree, Field):
            return self._field(tree)
        if isinstance(tree, Index):
            return self._index(tree)
        if isinstance(tree, Binary):
            return self._binary(tree)
        if isinstance(tree, Logical):
            return _logical(tree.operator, self.compile(tree.left), self.compile(tree.right))
        if isinstance(tree, Unary):
            return _unary(tree.operator, self.compile(tree.operand))
        if isinstance(tree, ListOf):
            return _list(tuple(self.compile(item) for item in tree.items))
        return self._call(tree)

    def _name(self, name: str) -> Evaluate:
        place = self._resolve(name)
        if isinstance(place, Literal):
            return constant(place.value)
        depth, slot = place
        return _local(slot, name) if depth == 0 else _outer(depth, slot, name)

    def _field(self, tree: Field) -> Evaluate:
        owner, name = self.compile(tree.owner), tree.name

        def field(slots: Slots) -> Value:
            value = owner(slots)
            if value.__class__ is dict and name in value:
                return value[name]
            return get_field(value, name)

        return field

    def _index(self, tree: Index) -> Evaluate:
        owner, index = self.compile(tree.owner), self.compile(tree.index)

        def item(slots: Slots) -> Value:
            value, key = owner(slots), index(slots)
            if value.__class__ is list and key.__class__ is int and 0 <= key < len(value):
                return value[key]
            return get_index(value, key)

        return item

    def _binary(self, tree: Binary) -> Evaluate:
        left, right = self.compile(tree.left), self.compile(tree.right)
        if tree.operator == "+":
            return _plus(left, right)
        if tree.operator in ("==", "!=") and isinstance(tree.right, Literal) and type(tree.right.value) is str:
            return _equals_text(left, tree.right.value, tree.operator == "==")
        operate = OPERATORS[tree.operator]
        if isinstance(tree.right, Literal):
            value = tree.right.value
            return lambda slots: operate(left(slots), value)
        return lambda slots: operate(left(slots), right(slots))

    def _call(self, tree: Call) -> Evaluate:
        function = self._function(tree.function)
        arguments = [self.compile(argument) for argument in tree.arguments]
        if len(arguments) == 1:
            only = arguments[0]
            return lambda slots: function(only(slots))
        if len(arguments) == 2:
            first, second = arguments
            return lambda slots: function(first(slots), second(slots))
        return lambda slots: function(*[argument(slots) for argument in arguments])


def constant(value: Value) -> Evaluate:
    return lambda slots: value


def unassigned(name: str) -> WorkflowError:
    message = f"key not found: {name} (the variable has no value on this path)"
    return system_error(decisions.UNASSIGNED_VARIABLE_TAG, message)


def _local(slot: int, name: str) -> Evaluate:
    def local(slots: Slots) -> Value:
        value = slots[slot]
        if value is UNSET:
            raise unassigned(name)
        return value

    return local


def _outer(depth: int, slot: int, name: str) -> Evaluate:
    def outer(slots: Slots) -> Value:
        for _ in range(depth):
            slots = slots[0]
        value = slots[slot]
        if value is UNSET:
            raise unassigned(name)
        return value

    return outer


def _plus(left: Evaluate, right: Evaluate) -> Evaluate:
    slow = OPERATORS["+"]

    def plus(slots: Slots) -> Value:
        first, second = left(slots), right(slots)
        if first.__class__ is int and second.__class__ is int:
            total = first + second
            if INT_MIN <= total <= INT_MAX:
                return total
        return slow(first, second)

    return plus


def _equals_text(left: Evaluate, text: str, expected: bool) -> Evaluate:
    return lambda slots: ((value := left(slots)).__class__ is str and value == text) is expected


def _logical(operator: str, left: Evaluate, right: Evaluate) -> Evaluate:
    decides = operator == "or"

    def logical(slots: Slots) -> Value:
        first = truth(left(slots), operator)
        return decides if first is decides else truth(right(slots), operator)

    return logical


def _unary(operator: str, operand: Evaluate) -> Evaluate:
    if operator == "-":
        return lambda slots: negate(operand(slots))
    return lambda slots: not truth(operand(slots), "not")


def _list(items: tuple[Evaluate, ...]) -> Evaluate:
    return lambda slots: [item(slots) for item in items]


def needs_check(value: Any) -> bool:
    """True for a value that may exceed a limit of memory."""
    return value.__class__ in _CHECKED
