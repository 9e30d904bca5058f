"""Values of a row as text. Errors reach records and Slack, so they tell a value's kind and size, and not the value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_WORD = re.compile(r"[a-z][a-z_ -]{0,19}")


class UnusableRow(ValueError):
    """A row that cannot be trained on, and the reason. A few such rows are left out and counted."""


class UnsupportedRow(ValueError):
    """A row with a part that training would lose: the model would learn something else. No run starts with one.

    `hint` says how to correct the data set.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def text_of(value: Any, name: str) -> str:
    """A string, or a number as text. Raises UnusableRow."""
    if isinstance(value, str):
        return _unicode(value, name)
    if isinstance(value, bool | int | float) and not is_empty(value):
        return str(value)
    raise UnusableRow(f"{name!r} is {kind_of(value)}; expected text")


def _unicode(text: str, name: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UnusableRow(f"{name!r} has half of a character (a surrogate); expected Unicode text") from None
    return text


def is_empty(value: Any) -> bool:
    """Whether a field has no value: null, NaN (pandas writes it for null), an empty text, list or object."""
    return value is None or (isinstance(value, float) and not math.isfinite(value)) or value in ("", [], {})


def kind_of(value: Any) -> str:
    """A value by its kind and size."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number" if math.isfinite(value) else "not a number (NaN)"
    if isinstance(value, Mapping):
        return f"an object with {len(value)} fields"
    return f"a list of {len(value)}" if isinstance(value, list) else f"a {type(value).__name__}"


def word(value: Any) -> str:
    """A role or a type as it is, if it is one short word, which no training text is; else its kind."""
    return repr(value) if isinstance(value, str) and _WORD.fullmatch(value) else kind_of(value)


def object_of(value: Any, name: str) -> dict[str, Any]:
    """An object, or a text that is one in JSON (OpenAI's `arguments`). Raises UnusableRow."""
    value = _parsed(value, name, "an object")
    if not isinstance(value, Mapping):
        raise UnusableRow(f"{name} is {kind_of(value)}; expected an object")
    return dict(value)


def list_of(value: Any, name: str) -> list[Any]:
    """A list, or a text that is one in JSON: a table has such texts in its columns. Raises UnusableRow."""
    value = _parsed(value, name, "a list")
    if not isinstance(value, list):
        raise UnusableRow(f"{name} is {kind_of(value)}; expected a list")
    return value


def _parsed(value: Any, name: str, expected: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise UnusableRow(f"{name} is {kind_of(value)}, which is not JSON; expected {expected}") from None
