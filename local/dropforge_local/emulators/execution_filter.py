"""The `filter` and `order_by` of executions.list: comparisons of fields, joined by AND, OR, NOT and parentheses."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from dropforge_local.base.errors import ApiError
from workflows_engine import ExecutionRecord

Predicate = Callable[[ExecutionRecord], bool]

_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<paren>[()])|(?P<operator><=|>=|!=|=|<|>|:)|"(?P<double>(?:\\.|[^"\\])*)"|'(?P<single>(?:\\.|[^'\\])*)'"""
    r"""|(?P<word>[^\s()=<>!:"']+))"""
)
_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": lambda a, b: a == b,
    ":": lambda a, b: b == "*" or a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def parse_filter(text: str) -> Predicate:
    """The predicate that a filter means. Raises INVALID_ARGUMENT."""
    return _Parser(text).parse() if text.strip() else lambda record: True


def parse_order(text: str) -> list[tuple[str, bool]]:
    """[(field, descending)]; the default is the newest first."""
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


_FIELDS: Final[dict[str, Callable[[ExecutionRecord], Any]]] = {
    "executionId": lambda record: record.id,
    "state": lambda record: record.state,
    "createTime": lambda record: record.created,
    "startTime": lambda record: record.started or 0.0,
    "endTime": lambda record: record.ended or 0.0,
    "duration": lambda record: (record.ended or 0.0) - (record.started or 0.0) if record.ended else 0.0,
    "workflowRevisionId": lambda record: record.revision_id,
    "stepName": lambda record: record.current_steps[-1]["step"] if record.current_steps else "",
}
_ALIASES: Final = {
    "execution_id": "executionId",
    "create_time": "createTime",
    "start_time": "startTime",
    "end_time": "endTime",
    "workflow_revision_id": "workflowRevisionId",
    "step_name": "stepName",
}


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._error(f"unexpected {text[at : at + 10]!r}")
            kind = match.lastgroup or ""
            self._tokens.append((kind, match.group(kind)))
            at = match.end()
        self._at = 0

    def parse(self) -> Predicate:
        predicate = self._all()
        if self._at < len(self._tokens):
            raise self._error(f"unexpected {self._tokens[self._at][1]!r}")
        return predicate

    def _all(self) -> Predicate:
        parts = [self._any()]
        while self._at < len(self._tokens) and self._tokens[self._at] != ("paren", ")"):
            self._take("word", "AND")
            parts.append(self._any())
        return parts[0] if len(parts) == 1 else lambda record: all(part(record) for part in parts)

    def _any(self) -> Predicate:
        parts = [self._one()]
        while self._take("word", "OR"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else lambda record: any(part(record) for part in parts)

    def _one(self) -> Predicate:
        if self._take("word", "NOT"):
            inner = self._one()
            return lambda record: not inner(record)
        if self._take("paren", "("):
            inner = self._all()
            if not self._take("paren", ")"):
                raise self._error("missing )")
            return inner
        name, operator, value = self._next("word"), self._next("operator"), self._next("word", "double", "single")
        return _comparison(name, operator, value, self._error)

    def _take(self, kind: str, text: str) -> bool:
        if self._at < len(self._tokens) and self._tokens[self._at] == (kind, text):
            self._at += 1
            return True
        return False

    def _next(self, *kinds: str) -> str:
        if self._at >= len(self._tokens) or self._tokens[self._at][0] not in kinds:
            found = self._tokens[self._at][1] if self._at < len(self._tokens) else "the end"
            raise self._error(f"unexpected {found!r}; expected FIELD OPERATOR VALUE")
        self._at += 1
        kind, text = self._tokens[self._at - 1]
        return re.sub(r"\\(.)", r"\1", text) if kind in ("double", "single") else text

    def _error(self, message: str) -> ApiError:
        return ApiError("INVALID_ARGUMENT", f"filter {self._text!r}: {message}")


def _comparison(name: str, operator: str, value: str, error: Callable[[str], ApiError]) -> Predicate:
    compare = _COMPARE[operator]
    root, _, key = name.partition(".")
    if root in ("label", "labels") and key:
        return lambda record: key in record.labels and compare(record.labels[key], value)
    field = _ALIASES.get(name, name)
    if field not in _FIELDS:
        raise error(f"unknown field {name!r}; expected one of {', '.join(_FIELDS)}, labels.KEY")
    wanted: Any = value
    if field.endswith("Time"):
        try:
            wanted = datetime.fromisoformat(value).timestamp()
        except ValueError as problem:
            raise error(f"{value!r} is not a timestamp") from problem
    elif field == "duration":
        try:
            wanted = float(value.removesuffix("s"))
        except ValueError as problem:
            raise error(f"{value!r} is not a duration such as 3.5s") from problem
    read = _FIELDS[field]
    return lambda record: compare(read(record), wanted)
