"""The meaning of the operators of the expression language.

A compiled expression handles the common case (two integers) itself and calls these functions for all other operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from .. import decisions
from ..errors import system_error
from ..values import Value, double_text, integer, kind


def _numbers(left: Value, right: Value) -> bool:
    return type(left) in (int, float) and type(right) in (int, float)


def _unsupported(operator: str, left: Value, right: Value) -> Exception:
    return system_error("TypeError", f"unsupported operand types for '{operator}': {kind(left)} and {kind(right)}")


def text_of(value: Value) -> str | None:
    """A scalar as `+` joins it to a string, and as string() returns it; None for other values."""
    if type(value) is str:
        return value
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int:
        return str(value)
    return double_text(value) if type(value) is float else None


def add(left: Value, right: Value) -> Value:
    if _numbers(left, right):
        return _number(left + right)
    if type(left) is str or type(right) is str:
        first, second = text_of(left), text_of(right)
        if first is not None and second is not None:
            return first + second
    raise _unsupported("+", left, right)


def _number(result: int | float) -> Value:
    return integer(result) if type(result) is int else result


def subtract(left: Value, right: Value) -> Value:
    if not _numbers(left, right):
        raise _unsupported("-", left, right)
    return _number(left - right)


def multiply(left: Value, right: Value) -> Value:
    if not _numbers(left, right):
        raise _unsupported("*", left, right)
    return _number(left * right)


def _divisor(operator: str, left: Value, right: Value) -> None:
    if not _numbers(left, right):
        raise _unsupported(operator, left, right)
    if right == 0:
        raise system_error("ZeroDivisionError", "division by zero")


def divide(left: Value, right: Value) -> Value:
    _divisor("/", left, right)
    return float(left) / float(right)


def floor_divide(left: Value, right: Value) -> Value:
    _divisor("//", left, right)
    return _number(left // right)


def remainder(left: Value, right: Value) -> Value:
    _divisor("%", left, right)
    return _number(left % right)


def equal(left: Value, right: Value) -> bool:
    """Deep equality; a boolean never equals a number."""
    first, second = type(left), type(right)
    if first is second:
        if first is list:
            return len(left) == len(right) and all(map(equal, left, right))
        if first is dict:
            return left.keys() == right.keys() and all(equal(item, right[key]) for key, item in left.items())
        return bool(left == right)
    return _numbers(left, right) and bool(left == right)


def not_equal(left: Value, right: Value) -> bool:
    return not equal(left, right)


def _ordering(operator: str, compare: Callable[[Any, Any], bool]) -> Callable[[Value, Value], bool]:
    def ordered(left: Value, right: Value) -> bool:
        if _numbers(left, right) or (decisions.STRINGS_ARE_ORDERED and type(left) is str and type(right) is str):
            return compare(left, right)
        raise _unsupported(operator, left, right)

    return ordered


def contains(needle: Value, haystack: Value) -> bool:
    """`in`: a key of a map, a value of a list."""
    if type(haystack) is dict:
        return type(needle) is str and needle in haystack
    if type(haystack) is list:
        return any(equal(needle, item) for item in haystack)
    raise system_error("TypeError", f"The argument of 'in' must be a dict or an array; got: {kind(haystack)}")


OPERATORS: Final[dict[str, Callable[[Value, Value], Value]]] = {
    "+": add,
    "-": subtract,
    "*": multiply,
    "/": divide,
    "//": floor_divide,
    "%": remainder,
    "==": equal,
    "!=": not_equal,
    "<": _ordering("<", lambda left, right: left < right),
    "<=": _ordering("<=", lambda left, right: left <= right),
    ">": _ordering(">", lambda left, right: left > right),
    ">=": _ordering(">=", lambda left, right: left >= right),
    "in": contains,
}


def negate(value: Value) -> Value:
    if type(value) not in (int, float):
        raise system_error("TypeError", f"unsupported operand type for unary '-': {kind(value)}")
    return _number(-value)


def truth(value: Value, operator: str) -> bool:
    """The boolean operand of a logical operator. Raises TypeError for every other value."""
    if type(value) is not bool:
        raise system_error("TypeError", f"operand of '{operator}' must be a boolean; got: {kind(value)}")
    return value


def get_field(owner: Value, name: str) -> Value:
    if type(owner) is not dict:
        raise system_error("TypeError", f"cannot read field '{name}' of {kind(owner)}; expected a map")
    if name not in owner:
        raise system_error("KeyError", f"key not found: {name}")
    return owner[name]


def get_index(owner: Value, index: Value) -> Value:
    if type(owner) is list:
        if type(index) is not int:
            raise system_error("TypeError", f"list index must be an integer; got: {kind(index)}")
        if not 0 <= index < len(owner):
            raise system_error("IndexError", f"index out of range [{index}] with length {len(owner)}")
        return owner[index]
    if type(owner) is not dict:
        raise system_error("TypeError", f"cannot index {kind(owner)}; expected a list or a map")
    if type(index) is not str:
        raise system_error("TypeError", f"map key must be a string; got: {kind(index)}")
    if index not in owner:
        raise system_error("KeyError", f"key not found: {index}")
    return owner[index]
