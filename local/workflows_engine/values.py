"""Values of the language (64-bit int, double, string, bool, null, list, map, bytes): their size, their form as text.

Nothing changes a list or map after its creation: an assignment into a list or map makes new ones along the path. The
assignment of a variable thus means a copy, and costs a reference.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any, Final, TypeAlias

from . import decisions
from .errors import WorkflowError, limit_error, system_error

Value: TypeAlias = Any  # a value of the kinds above; the language has dynamic types

INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1
SCALARS: Final = frozenset((int, float, bool, type(None)))


class Unset:
    """The value of a variable before its first assignment; a workflow never sees it."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


class Function:
    """A reference to a subworkflow or library function, as in `predicate: ${my_predicate}`."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


_KINDS: Final = {
    int: "integer",
    float: "double",
    str: "string",
    bool: "boolean",
    list: "list",
    dict: "map",
    bytes: "bytes",
    type(None): "null",
    Function: "function",
}


def kind(value: Value) -> str:
    """The name of a value's type, as `get_type` returns it."""
    return _KINDS[type(value)]


def double_text(number: float) -> str:
    """A double as string() and JSON write it."""
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return repr(number)


def integer(number: int) -> int:
    """`number` itself. Raises the overflow error if it does not fit 64 bits."""
    if INT_MIN <= number <= INT_MAX:
        return number
    raise system_error(decisions.INTEGER_OVERFLOW_TAG, "integer overflow")


class Sizer:
    """Sizes of values in bytes, by the service's rule: 8 for a scalar, recursive for strings, lists and maps.

    The sizer remembers the sizes of lists and maps by identity, because they never change: the size of an unchanged
    variable costs nothing, and the size of a list or map made from another costs only the difference.
    """

    def __init__(self, variables_bytes: int, string_bytes: int) -> None:
        self._variables_bytes = variables_bytes
        self._string_bytes = string_bytes
        self._known: dict[int, tuple[Value, int, int, int]] = {}
        self._remembered = 0

    def check(self, value: Value) -> None:
        """Raise ResourceLimitError for a value that by itself is over a limit, or nested too deeply."""
        if type(value) is str or type(value) is bytes:
            if len(value) > self._string_bytes // 4 and self.size(value) > self._string_bytes:
                raise self._string_error(self.size(value))
            return
        is_new = id(value) not in self._known
        try:
            size, depth, longest = self.measure(value)
        except RecursionError as error:
            raise limit_error(f"a value is nested deeper than {decisions.MAX_VALUE_DEPTH}") from error
        if longest > self._string_bytes:
            raise self._string_error(longest)
        if size > self._variables_bytes:
            raise memory_error(size, self._variables_bytes)
        if depth > decisions.MAX_VALUE_DEPTH:
            raise limit_error(f"a value is nested deeper than {decisions.MAX_VALUE_DEPTH}")
        self._remembered += size if is_new else 0
        if self._remembered > 16_000_000 or len(self._known) > 4096:
            self.forget()

    def _string_error(self, size: int) -> WorkflowError:
        return limit_error(f"a string of {size} bytes; the limit is {self._string_bytes}")

    def grown(self, value: Value, old: Value, part: Value) -> None:
        """Remember the size of `value`, which is the list `old` with another item, without a walk."""
        known = self._known.pop(id(old), None)
        if known is None or known[0] is not old:
            return
        size, depth, longest = self.measure(part)
        self._known[id(value)] = (value, known[1] + size, max(known[2], depth + 1), max(known[3], longest))
        self._remembered += size

    def forget(self) -> None:
        """Forget all sizes, and release the values they belong to."""
        self._known.clear()
        self._remembered = 0

    def size(self, value: Value) -> int:
        kind_ = type(value)
        if kind_ is list or kind_ is dict:
            return self._measure(value)[0]
        if kind_ is str:
            return 8 if len(value) < 8 else len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
        return max(8, len(value)) if kind_ is bytes else 8

    def measure(self, value: Value) -> tuple[int, int, int]:
        """(size, depth, size of the longest string or bytes inside) of a value."""
        if type(value) is list or type(value) is dict:
            return self._measure(value)
        size = self.size(value)
        return size, 0, size

    def _measure(self, value: Value) -> tuple[int, int, int]:
        known = self._known.get(id(value))
        if known is not None and known[0] is value:
            return known[1], known[2], known[3]
        size, depth, longest = 8, 0, 0
        parts = value
        if type(value) is dict:
            parts = value.values()
            size += sum(map(len, value))
            if size > self._string_bytes:
                longest = max(map(len, value))
        if SCALARS.issuperset(map(type, parts)):
            size += 8 * len(value)
        else:
            for part in parts:
                part_size, part_depth, part_longest = self.measure(part)
                size += part_size
                depth = max(depth, part_depth)
                longest = max(longest, part_longest)
        self._known[id(value)] = (value, size, depth + 1, longest)
        return size, depth + 1, longest


def memory_error(size: int, limit: int) -> WorkflowError:
    return limit_error(
        f"memory usage limit exceeded: {size} bytes of variables; the limit is {limit}", "MemoryLimitExceededError"
    )


_BYTES_KEY: Final = "\x00workflows.bytes"
_FUNCTION_KEY: Final = "\x00workflows.function"
_ESCAPED: Final = "\\u0000workflows."


def _encode_special(value: Value) -> Value:
    if isinstance(value, bytes):
        return {_BYTES_KEY: base64.b64encode(value).decode()}
    if isinstance(value, Function):
        return {_FUNCTION_KEY: value.name}
    raise TypeError(f"a value of type {type(value).__name__} cannot be stored")


def _decode_special(pairs: dict[str, Any]) -> Value:
    if len(pairs) == 1:
        if (text := pairs.get(_BYTES_KEY)) is not None:
            return base64.b64decode(text)
        if (name := pairs.get(_FUNCTION_KEY)) is not None:
            return Function(name)
    return pairs


_encoder = json.JSONEncoder(default=_encode_special, separators=(",", ":"), check_circular=False)


def encode_value(value: Value) -> str:
    """A value as text for the database: JSON that keeps bytes and function references."""
    return _encoder.encode(value)


def decode_value(text: str) -> Value:
    """The value that `encode_value` wrote."""
    return json.loads(text, object_hook=_decode_special) if _ESCAPED in text else json.loads(text)


class NotJson(Exception):
    """JSON has no form for a value; the message names its type."""


def _refuse(value: Value) -> Value:
    raise NotJson(f"{kind(value)} is not JSON-encodable")


_strict = json.JSONEncoder(
    default=_refuse, separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False
)
_sorted = json.JSONEncoder(
    default=_refuse, separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False, sort_keys=True
)


def to_json(value: Value, *, sort_keys: bool = False) -> str:
    """A value as JSON for callers and services. Raises NotJson for bytes, NaN and infinities."""
    try:
        return (_sorted if sort_keys else _strict).encode(value)
    except ValueError as error:
        raise NotJson("NaN and infinities are not JSON-encodable") from error


def utf8(text: str) -> bytes:
    """A text as bytes. Raises UnicodeError, which names the place, for a lone surrogate: no UTF-8 encodes it."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        message = f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; expected Unicode text"
        raise UnicodeError(message) from error


def from_json(text: str) -> Value:
    """JSON of callers and services as a value; integers beyond 64 bits become doubles. Raises ValueError."""
    try:
        return _decoder.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _parse_int(text: str) -> Value:
    if len(text) < 19:
        return int(text)
    number = float(text) if len(text) > 400 else int(text)
    return number if isinstance(number, int) and INT_MIN <= number <= INT_MAX else float(text)


def _refuse_constant(text: str) -> Value:
    raise ValueError(f"{text} is not JSON")


_decoder = json.JSONDecoder(parse_int=_parse_int, parse_constant=_refuse_constant)
