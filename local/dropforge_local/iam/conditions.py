"""Conditions of IAM bindings, in the part of CEL that IAM documents for resource attributes, as Python predicates.

https://cloud.google.com/iam/docs/conditions-attribute-reference (2026-11-23)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_TOKEN = re.compile(r'\s*(?:("(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\')|([A-Za-z_]\w*)|(&&|\|\||==|!=|[().,!\[\]]))')
_ESCAPED = re.compile(r"\\(.)")


class Unsupported(ValueError):
    """The local stack cannot evaluate an expression; the message says why."""


@dataclass(frozen=True)
class Resource:
    """The resource of a call. Conditions see `name` in Google's form, such as projects/_/buckets/B/objects/O."""

    name: str
    type: str = ""
    service: str = ""
    attributes: Mapping[str, Any] | None = None  # of the request, for api.getAttribute


Predicate = Callable[[Resource], bool]
_Value = Callable[[Resource], Any]
_METHODS: Mapping[str, Callable[[str, str], Any]] = {
    "startsWith": str.startswith,
    "endsWith": str.endswith,
}


def compile_condition(expression: str) -> Predicate:
    """The predicate of a condition. Raises Unsupported."""
    parser = _Parser(expression)
    value = parser.either()
    parser.expect("")
    return lambda resource: value(resource) is True


def extract(text: str, template: str) -> str:
    """IAM's `extract`: the text at the place of the template's {name}; "" where the template does not match.

    Without text after {name} the rest of the text is the result. Raises Unsupported.
    """
    match = re.fullmatch(r"([^{}]*)\{\w+\}([^{}]*)", template)
    if match is None:
        raise Unsupported(f"extract({template!r}) has no single {{name}}")
    before, after = match.groups()
    start = text.find(before)
    if start < 0:
        return ""
    start += len(before)
    end = text.find(after, start) if after else len(text)
    return text[start:end] if end >= 0 else ""


class _Parser:
    def __init__(self, expression: str) -> None:
        self._tokens: list[str] = []
        position = 0
        while position < len(expression.rstrip()):
            match = _TOKEN.match(expression, position)
            if match is None:
                raise Unsupported(f"cannot read {expression[position : position + 20]!r}")
            self._tokens.append(match[1] or match[2] or match[3])
            position = match.end()
        self._tokens.append("")

    def expect(self, wanted: str) -> None:
        token = self._tokens.pop(0)
        if token != wanted:
            raise Unsupported(f"expected {wanted or 'the end'!r}, not {token!r}")

    def either(self) -> _Value:
        terms = [self._both()]
        while self._take("||"):
            terms.append(self._both())
        return terms[0] if len(terms) == 1 else lambda resource: any(term(resource) is True for term in terms)

    def _both(self) -> _Value:
        terms = [self._comparison()]
        while self._take("&&"):
            terms.append(self._comparison())
        return terms[0] if len(terms) == 1 else lambda resource: all(term(resource) is True for term in terms)

    def _comparison(self) -> _Value:
        left = self._unary()
        if self._take("=="):
            right = self._unary()
            return lambda resource: left(resource) == right(resource)
        if self._take("!="):
            right = self._unary()
            return lambda resource: left(resource) != right(resource)
        return left

    def _unary(self) -> _Value:
        if self._take("!"):
            inner = self._unary()
            return lambda resource: inner(resource) is False
        value = self._primary()
        while self._take("."):
            value = self._method(value, self._tokens.pop(0))
        return value

    def _primary(self) -> _Value:
        token = self._tokens.pop(0)
        if token == "(":
            value = self.either()
            self.expect(")")
            return value
        if token[:1] in ("'", '"'):
            text = _ESCAPED.sub(r"\1", token[1:-1])
            return lambda resource: text
        if token in ("true", "false"):
            return lambda resource: token == "true"
        if token in ("resource", "api") and self._take("."):
            return self._attribute(f"{token}.{self._tokens.pop(0)}")
        raise Unsupported(f"{token!r} is not evaluated here")

    def _attribute(self, name: str) -> _Value:
        if name == "resource.name":
            return lambda resource: resource.name
        if name == "resource.type":
            return lambda resource: resource.type
        if name == "resource.service":
            return lambda resource: resource.service
        if name == "api.getAttribute":
            key, default = self._arguments(2)
            return lambda resource: (resource.attributes or {}).get(key(resource), default(resource))
        raise Unsupported(f"{name} is not evaluated here")

    def _method(self, value: _Value, name: str) -> _Value:
        if name == "extract":
            (template,) = self._arguments(1)
            extract("", template(Resource("")))  # refuses a wrong template now
            return lambda resource: extract(value(resource), template(resource))
        if name not in _METHODS:
            raise Unsupported(f"{name}() is not evaluated here")
        work, (argument,) = _METHODS[name], self._arguments(1)
        return lambda resource: work(value(resource), argument(resource))

    def _arguments(self, count: int) -> list[_Value]:
        self.expect("(")
        arguments = [self.either()]
        while self._take(","):
            arguments.append(self.either())
        self.expect(")")
        if len(arguments) != count:
            raise Unsupported(f"{len(arguments)} arguments; expected {count}")
        return arguments

    def _take(self, wanted: str) -> bool:
        is_wanted = self._tokens[0] == wanted
        if is_wanted:
            self._tokens.pop(0)
        return is_wanted
