"""Reads the language of terraform/*.tf: blocks, and expressions as Python functions of a scope.

It reads what those files use. Heredocs, splats and template directives raise HclError.
https://github.com/hashicorp/hcl/blob/main/hclsyntax/spec.md
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

_TOKEN = re.compile(
    r"""
    (?P<space>(?:[ \t\r]|/\*[\s\S]*?\*/|(?:\#|//)[^\n]*)+)
    |(?P<line>\n)
    |(?P<number>\d+(?:\.\d+)?)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<mark>\.\.\.|=>|==|!=|<=|>=|&&|\|\||[-+*/%<>!?:=.,()\[\]{}])
    """,
    re.X,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}
_LITERALS = {"true": True, "false": False, "null": None}
# Operators from the loosest to the tightest; && and || are lazy.
_LEVELS: tuple[Mapping[str, Callable[[Any, Any], Any]], ...] = (
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": operator.truediv, "%": operator.mod},
)


class HclError(ValueError):
    """The text is not in the part of the language that this reader knows, or an expression has no value."""


class Scope(Protocol):
    """The meaning of the names and the functions in an expression."""

    def value(self, name: str) -> Any:
        """The value of a root name: a variable of a `for`, `var`, `local`, a type of resource. Raises HclError."""

    def attribute(self, value: Any, name: str) -> Any:
        """The attribute `name` of a value. Raises HclError."""

    def call(self, function: str, arguments: list[Any]) -> Any:
        """The result of a function. Raises HclError."""

    def inner(self, names: Mapping[str, Any]) -> Scope:
        """This scope with the variables of a `for`."""


Expression = Callable[[Scope], Any]


@dataclass
class Block:
    """A block or a file: attributes by name, and inner blocks in order."""

    kind: str = ""
    labels: tuple[str, ...] = ()
    attributes: dict[str, Expression] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class _Token:
    kind: str
    value: Any  # the text; of a string, its parts: text and expressions
    line: int


def read(text: str) -> Block:
    """The content of a file. Raises HclError with the line."""
    return _Parser(list(_tokens(text))).body("end")


def _tokens(text: str) -> Iterator[_Token]:
    position, line = 0, 1
    while position < len(text):
        if text[position] == '"':
            parts, end = _string(text, position + 1)
            yield _Token("string", parts, line)
        elif match := _TOKEN.match(text, position):
            end = match.end()
            if match.lastgroup != "space":
                yield _Token(str(match.lastgroup), match[0], line)
        else:
            raise HclError(f"line {line}: cannot read {text[position : position + 20]!r}")
        line += text.count("\n", position, end)
        position = end
    yield _Token("line", "\n", line)
    yield _Token("end", "", line)


def _string(text: str, position: int) -> tuple[list[str | Expression], int]:
    """The parts of a quoted string, and the position after it."""
    parts: list[str | Expression] = []
    while text[position : position + 1] != '"':
        if position >= len(text):
            raise HclError("a string has no end")
        if text.startswith(("$${", "%%{"), position):
            parts.append(text[position + 1 : position + 3])
            position += 3
        elif text.startswith("%{", position):
            raise HclError("template directives (%{) are not read")
        elif text.startswith("${", position):
            end = _end_of_template(text, position + 2)
            parts.append(_Parser(list(_tokens(text[position + 2 : end])), nested=True).whole())
            position = end + 1
        elif text[position] == "\\":
            parts.append(_ESCAPES[text[position + 1]])
            position += 2
        else:
            parts.append(text[position])
            position += 1
    return parts, position + 1


def _end_of_template(text: str, position: int) -> int:
    """The position of the brace that ends an interpolation."""
    depth = 0
    while depth or text[position] != "}":
        if text[position] == '"':
            _, position = _string(text, position + 1)
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        position += 1
    return position


class _Parser:
    """Reads tokens. `nested`: inside brackets, where line ends have no meaning."""

    def __init__(self, tokens: list[_Token], *, nested: bool = False) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = int(nested)

    def body(self, end: str) -> Block:
        """Attributes and blocks until `end`."""
        block = Block()
        while True:
            self._skip_lines()
            if self._take(end):
                return block
            name = self._expect("name")
            if self._take("="):
                block.attributes[name] = self.expression()
                continue
            labels = []
            while not self._take("{"):
                label = self._next()
                labels.append("".join(label.value) if label.kind == "string" else str(label.value))
            inner = self.body("}")
            block.blocks.append(Block(name, tuple(labels), inner.attributes, inner.blocks))

    def whole(self) -> Expression:
        value = self.expression()
        self._expect("end")
        return value

    def expression(self) -> Expression:
        condition = self._or()
        if not self._take("?"):
            return condition
        yes = self.expression()
        self._expect(":")
        no = self.expression()
        return lambda scope: yes(scope) if condition(scope) else no(scope)

    def _or(self) -> Expression:
        left = self._and()
        while self._take("||"):
            left = _either(left, self._and())
        return left

    def _and(self) -> Expression:
        left = self._binary(0)
        while self._take("&&"):
            left = _both(left, self._binary(0))
        return left

    def _binary(self, level: int) -> Expression:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self._peek().kind == "mark" and (work := _LEVELS[level].get(self._peek().value)):
            self._next()
            left = _combine(work, left, self._binary(level + 1))
        return left

    def _unary(self) -> Expression:
        if self._take("!"):
            negated = self._unary()
            return lambda scope: not negated(scope)
        if self._take("-"):
            number = self._unary()
            return lambda scope: -number(scope)
        return self._traversal()

    def _traversal(self) -> Expression:
        value = self._term()
        while True:
            if self._take("["):
                value = _index(value, self._inside(self.expression, "]"))
            elif self._take("."):
                value = _attribute(value, self._expect("name"))
            else:
                return value

    def _term(self) -> Expression:
        token = self._next()
        if token.kind == "string":
            return _template(token.value)
        if token.kind == "number":
            number = float(token.value) if "." in token.value else int(token.value)
            return lambda scope: number
        if token.kind == "name":
            return self._named(token.value)
        if token.value == "(":
            return self._inside(self.expression, ")")
        if token.value == "[":
            return self._inside(self._tuple)
        if token.value == "{":
            return self._inside(self._object)
        raise HclError(f"line {token.line}: unexpected {token.value!r}")

    def _named(self, name: str) -> Expression:
        if self._take("("):
            return self._inside(lambda: self._call(name))
        if name in _LITERALS:
            return lambda scope: _LITERALS[name]
        return lambda scope: scope.value(name)

    def _call(self, name: str) -> Expression:
        arguments: list[Expression] = []
        expands = False
        while not self._take(")"):
            arguments.append(self.expression())
            expands = self._take("...")
            self._take(",")
        if name in ("can", "try"):
            return _attempt(name, arguments)

        def call(scope: Scope) -> Any:
            values = [argument(scope) for argument in arguments]
            return scope.call(name, [*values[:-1], *values[-1]] if expands else values)

        return call

    def _tuple(self) -> Expression:
        if self._is_for():
            return self._for("]")
        items: list[Expression] = []
        while not self._take("]"):
            items.append(self.expression())
            self._take(",")
        return lambda scope: [item(scope) for item in items]

    def _object(self) -> Expression:
        if self._is_for():
            return self._for("}")
        items: list[tuple[Expression, Expression]] = []
        while not self._take("}"):
            items.append((self._key(), self.expression()))
            self._take(",")
        return lambda scope: {key(scope): value(scope) for key, value in items}

    def _key(self) -> Expression:
        if self._peek().kind == "name":
            name = self._next().value
            key: Expression = lambda scope: name  # noqa: E731 - as the other expressions
        else:
            key = self._term()
        if not self._take("=") and not self._take(":"):
            raise HclError(f"line {self._peek().line}: expected = after a key")
        return key

    def _is_for(self) -> bool:
        return self._peek().kind == "name" and self._peek().value == "for"

    def _for(self, end: str) -> Expression:
        """`for a, b in collection : [key =>] value [if condition]`"""
        self._next()
        names = [self._expect("name")]
        if self._take(","):
            names.append(self._expect("name"))
        if self._expect("name") != "in":
            raise HclError(f"line {self._peek().line}: expected `in`")
        collection = self.expression()
        self._expect(":")
        first = self.expression()
        second = self.expression() if self._take("=>") else None
        condition: Expression = lambda scope: True  # noqa: E731 - as the other expressions
        if self._peek().value == "if":
            self._next()
            condition = self.expression()
        self._expect(end)

        def scopes(scope: Scope) -> Iterator[Scope]:
            for key, value in pairs(collection(scope)):
                inner = scope.inner(dict(zip(reversed(names), (value, key), strict=False)))
                if condition(inner):
                    yield inner

        if second is None:
            return lambda scope: [first(inner) for inner in scopes(scope)]
        return lambda scope: {first(inner): second(inner) for inner in scopes(scope)}

    def _inside(self, parse: Callable[[], Expression], end: str = "") -> Expression:
        self._depth += 1
        value = parse()
        if end:
            self._expect(end)
        self._depth -= 1
        return value

    def _skip_lines(self) -> None:
        while self._tokens[self._at].kind == "line":
            self._at += 1

    def _peek(self) -> _Token:
        if self._depth:
            self._skip_lines()
        return self._tokens[self._at]

    def _next(self) -> _Token:
        token = self._peek()
        self._at += 1
        return token

    def _take(self, wanted: str) -> bool:
        """Whether the next token is `wanted`, a mark or a kind; such a token is taken."""
        token = self._peek()
        is_wanted = token.value == wanted if token.kind == "mark" else token.kind == wanted
        self._at += is_wanted
        return is_wanted

    def _expect(self, wanted: str) -> str:
        token = self._peek()
        if not self._take(wanted):
            raise HclError(f"line {token.line}: expected {wanted}, not {token.value!r}")
        return str(token.value)


def pairs(collection: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and values of an object; of a set or a tuple, positions and items."""
    return iter(collection.items() if isinstance(collection, Mapping) else enumerate(collection))


def _either(left: Expression, right: Expression) -> Expression:
    return lambda scope: left(scope) or right(scope)


def _both(left: Expression, right: Expression) -> Expression:
    return lambda scope: left(scope) and right(scope)


def _combine(work: Callable[[Any, Any], Any], left: Expression, right: Expression) -> Expression:
    return lambda scope: work(left(scope), right(scope))


def _attribute(value: Expression, name: str) -> Expression:
    return lambda scope: scope.attribute(value(scope), name)


def _index(value: Expression, key: Expression) -> Expression:
    def index(scope: Scope) -> Any:
        container, wanted = value(scope), key(scope)
        if isinstance(container, Mapping) and not isinstance(wanted, str):
            wanted = str(wanted).lower()  # the keys of an object are text
        try:
            return container[wanted]
        except (KeyError, IndexError, TypeError) as error:
            raise HclError(f"no element {wanted!r}") from error

    return index


def _template(parts: Iterable[str | Expression]) -> Expression:
    merged: list[str | Expression] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    if not merged:
        return lambda scope: ""
    if len(merged) == 1 and not isinstance(merged[0], str):
        return merged[0]
    return lambda scope: "".join(part if isinstance(part, str) else str(part(scope)) for part in merged)


def _attempt(name: str, arguments: list[Expression]) -> Expression:
    """`can` and `try`, whose arguments may fail."""

    def attempt(scope: Scope) -> Any:
        for argument in arguments:
            try:
                value = argument(scope)
            except HclError:
                continue
            return True if name == "can" else value
        if name == "can":
            return False
        raise HclError("no argument of try has a value")

    return attempt
