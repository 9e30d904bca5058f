"""The `filter` and `order_by` of executions.list and stepEntries.list: comparisons of fields, joined by AND, OR, NOT,
a minus sign and parentheses.

As in https://google.aip.dev/160, OR binds tighter than AND, and AND may be left out. A field may be written in any of
the APIs' spellings: workflowRevisionId, workflowRevisionID, workflow_revision_id.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from lark import v_args

from dropforge_local.base.errors import ApiError
from workflows_engine import ExecutionRecord

from ..kit.filters import Language, Meaning

Predicate = Callable[[Any], bool]
Read = Callable[[Any], Any]
Parse = Callable[[str], Any]
Json = Mapping[str, Any]
GRAMMAR: Final = r"""
    ?start: conjunction
    ?conjunction: disjunction | disjunction (_AND? disjunction)+ -> all_of
    ?disjunction: term | term (_OR term)+ -> any_of
    ?term: (_NOT | "-") simple -> negation
         | simple
    ?simple: "(" conjunction ")"
         | NAME OPERATOR value -> comparison
    ?value: WORD -> word | STRING -> string

    OPERATOR: /<=|>=|!=|=|<|>|:/
    NAME: /[^\s()=<>!:"'-][^\s()=<>!:"']*/
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


def _timestamp(text: str) -> float:
    """Seconds since the epoch of a timestamp or a date, in UTC if it names no time zone."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a timestamp") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _duration(text: str) -> float:
    try:
        return float(text.removesuffix("s"))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a duration such as 3.5s") from error


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is not true or false")
    return text.lower() == "true"


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not an integer") from error


def _without(prefix: str) -> Parse:
    """A name of an enum, with or without its prefix: the API's own example is state="SUCCEEDED"."""
    return lambda text: text if text.startswith(prefix) else prefix + text


# How a field is read from an item, and how the value in the filter becomes a value of the same kind.
EXECUTION_FIELDS: Final[Mapping[str, tuple[Read, Parse]]] = {
    "executionId": (lambda record: record.id, str),
    "state": (lambda record: record.state, str),
    "createTime": (lambda record: record.created, _timestamp),
    "startTime": (lambda record: record.started or 0.0, _timestamp),
    "endTime": (lambda record: record.ended or 0.0, _timestamp),
    "duration": (
        lambda record: (record.ended or 0.0) - (record.started or 0.0) if record.ended else 0.0,
        _duration,
    ),
    "workflowRevisionId": (lambda record: record.revision_id, str),
    "stepName": (lambda record: record.current_steps[-1]["step"] if record.current_steps else "", str),
    "disableConcurrencyQuotaOverflowBuffering": (
        lambda record: bool(record.settings.get("disable_overflow_buffering")),
        _boolean,
    ),
}
# Of the JSON of a step entry.
ENTRY_FIELDS: Final[Mapping[str, tuple[Read, Parse]]] = {
    "entryId": (lambda entry: int(entry["entryId"]), _number),
    "createTime": (lambda entry: _timestamp(entry["createTime"]), _timestamp),
    "updateTime": (lambda entry: _timestamp(entry["updateTime"]), _timestamp),
    "routine": (lambda entry: entry["routine"], str),
    "step": (lambda entry: entry["step"], str),
    "stepType": (lambda entry: entry["stepType"], _without("STEP_")),
    "parent": (lambda entry: int(entry["navigationInfo"].get("parent", 0)), _number),
    "state": (lambda entry: entry["state"], _without("STATE_")),
}
Order = list[tuple[str, bool]]  # of (field, descending)


@v_args(inline=True)
class _Comparisons(Meaning):
    def __init__(self, fields: Mapping[str, tuple[Read, Parse]], *, has_labels: bool) -> None:
        super().__init__()
        self._fields = fields
        self._has_labels = has_labels

    def word(self, token: str) -> str:
        return str(token)

    def string(self, token: str) -> str:
        return re.sub(r"\\(.)", r"\1", token[1:-1])

    def comparison(self, name: str, operator: str, value: str) -> Predicate:
        compare = _COMPARE[operator]
        root, _, key = name.partition(".")
        if self._has_labels and root in ("label", "labels") and key:
            return lambda record: key in record.labels and compare(record.labels[key], value)
        field = _known(name, self._fields)
        if field is None:
            more = ", labels.KEY" if self._has_labels else ""
            raise ValueError(f"unknown field {str(name)!r}; expected one of {', '.join(self._fields)}{more}")
        read, parse = self._fields[field]
        wanted = "*" if (operator, value) == (":", "*") else parse(value)
        return lambda item: compare(read(item), wanted)


_OF_EXECUTIONS: Final = Language(GRAMMAR, _Comparisons(EXECUTION_FIELDS, has_labels=True))
_OF_ENTRIES: Final = Language(GRAMMAR, _Comparisons(ENTRY_FIELDS, has_labels=False))


def parse_filter(text: str) -> Callable[[ExecutionRecord], bool]:
    """The predicate of a filter of executions; an empty filter matches all of them. Raises INVALID_ARGUMENT."""
    return _OF_EXECUTIONS.compile(text) if text.strip() else lambda record: True


def parse_entry_filter(text: str) -> Callable[[Json], bool]:
    """The predicate of a filter of step entries in JSON; an empty filter matches all. Raises INVALID_ARGUMENT."""
    return _OF_ENTRIES.compile(text) if text.strip() else lambda entry: True


def parse_order(text: str, fields: Mapping[str, tuple[Read, Parse]] = EXECUTION_FIELDS) -> Order:
    """The fields of an `order_by`; [] for the default order. Raises INVALID_ARGUMENT."""
    order: Order = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        words = part.split()
        field = _known(words[0], fields)
        if field is None or len(words) > 2 or (len(words) == 2 and words[1] not in ("asc", "desc")):
            raise ApiError(
                "INVALID_ARGUMENT",
                f"order_by {text!r}: {part!r} is not FIELD [asc|desc] with one of {', '.join(fields)}",
            )
        order.append((field, words[-1] == "desc"))
    return order


def sort(items: list[Any], order: Order, fields: Mapping[str, tuple[Read, Parse]] = EXECUTION_FIELDS) -> None:
    """Sort items in place by an order; items that it does not distinguish keep their places."""
    for name, descending in reversed(order):
        items.sort(key=fields[name][0], reverse=descending)


def names_steps(text: str) -> bool:
    """Whether a filter or an order may read the current step of executions, which costs a look at each."""
    return "stepname" in text.lower().replace("_", "")


def _known(name: str, fields: Mapping[str, Any]) -> str | None:
    """The field that a name in any spelling means."""
    plain = name.replace("_", "").lower()
    return next((field for field in fields if field.lower() == plain), None)
