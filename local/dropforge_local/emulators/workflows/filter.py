"""The `filter` and `order_by` of executions.list: comparisons of fields, joined by AND, OR, NOT and parentheses.

As in https://google.aip.dev/160, OR binds tighter than AND, and AND may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from lark import v_args

from dropforge_local.base.errors import ApiError
from workflows_engine import ExecutionRecord

from ..kit.filters import Language, Meaning

Predicate = Callable[[ExecutionRecord], bool]
GRAMMAR: Final = r"""
    ?start: conjunction
    ?conjunction: disjunction | disjunction (_AND? disjunction)+ -> all_of
    ?disjunction: term | term (_OR term)+ -> any_of
    ?term: _NOT term -> negation
         | "(" conjunction ")"
         | WORD OPERATOR value -> comparison
    ?value: WORD -> word | STRING -> string

    OPERATOR: /<=|>=|!=|=|<|>|:/
    WORD: /[^\s()=<>!:"']+/
    STRING: /"(\\.|[^"\\])*"|'(\\.|[^'\\])*'/s
    _AND.1: /AND(?![^\s()=<>!:"'])/
    _OR.1: /OR(?![^\s()=<>!:"'])/
    _NOT.1: /NOT(?![^\s()=<>!:"'])/
"""
_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": lambda a, b: a == b,
    ":": lambda a, b: b == "*" or a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
_FIELDS: Final[Mapping[str, Callable[[ExecutionRecord], Any]]] = {
    "executionId": lambda record: record.id,
    "state": lambda record: record.state,
    "createTime": lambda record: record.created,
    "startTime": lambda record: record.started or 0.0,
    "endTime": lambda record: record.ended or 0.0,
    "duration": lambda record: (record.ended or 0.0) - (record.started or 0.0) if record.ended else 0.0,
    "workflowRevisionId": lambda record: record.revision_id,
    "stepName": lambda record: record.current_steps[-1]["step"] if record.current_steps else "",
}


def parse_filter(text: str) -> Predicate:
    """The predicate of a filter; an empty filter matches every execution. Raises INVALID_ARGUMENT."""
    return LANGUAGE.compile(text) if text.strip() else lambda record: True


def parse_order(text: str) -> list[tuple[str, bool]]:
    """[(field, descending)]; the default is the newest first. Raises INVALID_ARGUMENT."""
    order: list[tuple[str, bool]] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        words = part.split()
        if words[0] not in _FIELDS or len(words) > 2 or (len(words) == 2 and words[1] not in ("asc", "desc")):
            raise ApiError(
                "INVALID_ARGUMENT",
                f"order_by {text!r}: {part!r} is not FIELD [asc|desc] with one of {', '.join(_FIELDS)}",
            )
        order.append((words[0], words[-1] == "desc"))
    return order or [("createTime", True)]


def field_of(record: ExecutionRecord, name: str) -> Any:
    """A field's value in a form that compares."""
    return _FIELDS[name](record)


@v_args(inline=True)
class _OfExecutions(Meaning):
    def word(self, token: str) -> str:
        return str(token)

    def string(self, token: str) -> str:
        return re.sub(r"\\(.)", r"\1", token[1:-1])

    def comparison(self, name: str, operator: str, value: str) -> Predicate:
        compare = _COMPARE[operator]
        root, _, key = name.partition(".")
        if root in ("label", "labels") and key:
            return lambda record: key in record.labels and compare(record.labels[key], value)
        field = re.sub(r"_([a-z])", lambda match: match[1].upper(), name)
        if field not in _FIELDS:
            raise ValueError(f"unknown field {str(name)!r}; expected one of {', '.join(_FIELDS)}, labels.KEY")
        wanted, read = _comparable(field, value), _FIELDS[field]
        return lambda record: compare(read(record), wanted)


LANGUAGE: Final = Language(GRAMMAR, _OfExecutions())


def _comparable(field: str, value: str) -> Any:
    """The value in the form that `field_of` returns."""
    if field.endswith("Time"):
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError as error:
            raise ValueError(f"{value!r} is not a timestamp") from error
    if field == "duration":
        try:
            return float(value.removesuffix("s"))
        except ValueError as error:
            raise ValueError(f"{value!r} is not a duration such as 3.5s") from error
    return value
