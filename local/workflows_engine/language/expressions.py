"""The expression language: its grammar and its tree.

`parse` returns a tree of the dataclasses below; `evaluation.py` turns a tree into closures. Precedence, from the
documentation: () . [] then not, unary minus, * / // %, + -, comparisons and `in`, and, or. `not` binds tighter than
arithmetic, so `not x in y` means `(not x) in y`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from lark import Lark, Token, Transformer, UnexpectedInput, UnexpectedToken, v_args
from lark.exceptions import VisitError

from .. import decisions
from ..values import INT_MAX, INT_MIN, Value

GRAMMAR: Final = r"""
?start: disjunction
?disjunction: conjunction | disjunction _OR conjunction -> or_
?conjunction: comparison | conjunction _AND comparison -> and_
?comparison: sum | comparison COMPARE sum -> binary
?sum: product | sum ADD product -> binary
         | sum MINUS product -> binary
?product: negation | product MULTIPLY negation -> binary
?negation: inversion | MINUS negation -> negative
?inversion: trailer | _NOT inversion -> not_
?trailer: atom
    | trailer "." NAME -> field
    | trailer "[" disjunction "]" -> index
    | trailer "(" [disjunction ("," disjunction)*] ")" -> call
?atom: NAME -> name
    | INTEGER -> integer
    | DOUBLE -> double
    | STRING -> string
    | TRUE -> true
    | FALSE -> false
    | NULL -> null
    | "[" [disjunction ("," disjunction)*] "]" -> list
    | "(" disjunction ")" -> group

target: NAME target_part*
target_part: "." NAME -> target_field | "[" disjunction "]" -> target_index

_OR.2: /(or|OR)(?![A-Za-z0-9_])/
_AND.2: /(and|AND)(?![A-Za-z0-9_])/
_NOT.2: /(not|NOT)(?![A-Za-z0-9_])/
COMPARE.2: /==|!=|<=|>=|<|>|in(?![A-Za-z0-9_])/
TRUE.2: /(true|True|TRUE)(?![A-Za-z0-9_])/
FALSE.2: /(false|False|FALSE)(?![A-Za-z0-9_])/
NULL.2: /(null|Null|NULL)(?![A-Za-z0-9_])/
ADD: "+"
MINUS: "-"
MULTIPLY: /\/\/|[*\/%]/
DOUBLE.2: /[0-9]+\.[0-9]+([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.[0-9]+([eE][-+]?[0-9]+)?/
INTEGER: /[0-9]+/
NAME: /[A-Za-z_][A-Za-z0-9_]*/
STRING: /"(\\.|[^"\\])*"|'(\\.|[^'\\])*'/s
%ignore /[ \t\r\n]+/
"""


@dataclass(frozen=True, slots=True)
class Literal:
    value: Value
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Name:
    name: str
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Field:
    owner: Expression
    name: str
    depth: int


@dataclass(frozen=True, slots=True)
class Index:
    owner: Expression
    index: Expression
    depth: int


@dataclass(frozen=True, slots=True)
class Call:
    function: str
    arguments: tuple[Expression, ...]
    depth: int


@dataclass(frozen=True, slots=True)
class Unary:
    operator: str  # "-" or "not"
    operand: Expression
    depth: int


@dataclass(frozen=True, slots=True)
class Binary:
    operator: str
    left: Expression
    right: Expression
    depth: int


@dataclass(frozen=True, slots=True)
class Logical:
    operator: str  # "and" or "or"
    left: Expression
    right: Expression
    depth: int


@dataclass(frozen=True, slots=True)
class ListOf:
    items: tuple[Expression, ...]
    depth: int


Expression = Literal | Name | Field | Index | Call | Unary | Binary | Logical | ListOf


@dataclass(frozen=True, slots=True)
class Target:
    """The left side of an assignment: a variable and the path into it."""

    name: str
    path: tuple[Expression, ...]


class ExpressionError(Exception):
    """The text is not an expression; `offset` is the position of the mistake."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


@lru_cache(4096)
def parse(text: str) -> Expression:
    """The tree of the text between `${` and `}`. Raises ExpressionError."""
    tree: Expression = _run("start", text)
    return tree


@lru_cache(4096)
def parse_target(text: str) -> Target:
    """The tree of an assignment's left side. Raises ExpressionError."""
    target: Target = _run("target", text)
    return target


@lru_cache(1)
def _parser() -> Lark:
    return Lark(GRAMMAR, start=["start", "target"], parser="lalr", transformer=_Builder(), maybe_placeholders=False)


def _run(start: str, text: str) -> Any:
    try:
        return _parser().parse(text, start=start)
    except UnexpectedInput as error:
        at_end = isinstance(error, UnexpectedToken) and error.token.type == "$END"
        offset = error.pos_in_stream if isinstance(error.pos_in_stream, int) and not at_end else len(text)
        unexpected = repr(text[offset : offset + 12]) if 0 <= offset < len(text) else "the end"
        raise ExpressionError(_explain(text, offset, unexpected), max(offset, 0)) from error
    except VisitError as error:
        if isinstance(error.orig_exc, ExpressionError):
            raise error.orig_exc from error
        raise


def _explain(text: str, offset: int, unexpected: str) -> str:
    if not text.strip():
        return "the expression is empty"
    hint = ""
    if text[offset : offset + 1] == "{":
        hint = "; a map cannot be written inside an expression, assign it in a step first"
    elif "${" in text:
        hint = "; an expression is one whole ${…} and cannot consist of several"
    elif text[offset : offset + 3] == "not":
        hint = "; write not(x in y)"
    return f"unexpected {unexpected}{hint}"


def _nest(*parts: Any) -> int:
    depth: int = 1 + max((part.depth for part in parts), default=0)
    if depth > decisions.MAX_EXPRESSION_DEPTH:
        raise ExpressionError(f"the expression is nested deeper than {decisions.MAX_EXPRESSION_DEPTH}")
    return depth


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)


def _unescape(match: re.Match[str]) -> str:
    code = match.group(1)
    return chr(int(code[1:], 16)) if len(code) == 5 else _ESCAPES.get(code, code)


@v_args(inline=True)
class _Builder(Transformer[Token, Any]):
    """Builds the tree while the parser reduces, so that the depth of the text causes no recursion."""

    def name(self, token: Token) -> Expression:
        return Name(str(token))

    def integer(self, token: Token) -> Expression:
        number = int(token)
        return Literal(number if number <= INT_MAX else float(number))

    def double(self, token: Token) -> Expression:
        return Literal(float(token))

    def string(self, token: Token) -> Expression:
        text = _ESCAPE.sub(_unescape, token[1:-1])
        return Literal(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def true(self, _: Token) -> Expression:
        return Literal(True)

    def false(self, _: Token) -> Expression:
        return Literal(False)

    def null(self, _: Token) -> Expression:
        return Literal(None)

    def group(self, inner: Expression) -> Expression:
        return inner

    def list(self, *items: Expression) -> Expression:
        return ListOf(items, _nest(*items))

    def field(self, owner: Expression, name: Token) -> Expression:
        return Field(owner, str(name), _nest(owner))

    def index(self, owner: Expression, index: Expression) -> Expression:
        return Index(owner, index, _nest(owner, index))

    def call(self, function: Expression, *arguments: Expression) -> Expression:
        path = dotted(function)
        if path is None:
            raise ExpressionError("only a named function can be called")
        return Call(path, arguments, _nest(*arguments))

    def negative(self, _: Token, operand: Expression) -> Expression:
        if isinstance(operand, Literal) and type(operand.value) in (int, float):
            if operand.value == float(2**63):  # -2**63 fits 64 bits, 2**63 does not
                return Literal(INT_MIN)
            return Literal(-operand.value)
        return Unary("-", operand, _nest(operand))

    def not_(self, operand: Expression) -> Expression:
        return Unary("not", operand, _nest(operand))

    def binary(self, left: Expression, operator: Token, right: Expression) -> Expression:
        return Binary(str(operator), left, right, _nest(left, right))

    def and_(self, left: Expression, right: Expression) -> Expression:
        return Logical("and", left, right, _nest(left, right))

    def or_(self, left: Expression, right: Expression) -> Expression:
        return Logical("or", left, right, _nest(left, right))

    def target(self, name: Token, *path: Expression) -> Target:
        return Target(str(name), path)

    def target_field(self, name: Token) -> Expression:
        return Literal(str(name))

    def target_index(self, index: Expression) -> Expression:
        return index


def dotted(expression: Expression) -> str | None:
    """`a.b.c` of a chain of names and fields, or None."""
    names: list[str] = []
    while isinstance(expression, Field):
        names.append(expression.name)
        expression = expression.owner
    if not isinstance(expression, Name):
        return None
    return ".".join([expression.name, *reversed(names)])
