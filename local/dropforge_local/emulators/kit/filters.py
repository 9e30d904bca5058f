"""Filter languages of list and subscription requests: a lark grammar each, over one base, compiled to predicates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from lark import Lark, Transformer, UnexpectedCharacters, UnexpectedInput, UnexpectedToken, v_args

from dropforge_local.base.errors import ApiError

Predicate = Callable[[Any], bool]
_BASE = r"""
    %ignore /\s+/
"""


class Language:
    """A filter language: a lark grammar with the rule `start`, and a `Meaning` that makes a predicate of each rule.

    The grammar's rules may use the methods of `Meaning` as aliases (`-> all_of`).
    """

    def __init__(self, grammar: str, meaning: Meaning) -> None:
        self._grammar = grammar
        self._meaning = meaning

    def compile(self, text: str) -> Predicate:
        """The predicate of a filter. Raises INVALID_ARGUMENT."""
        try:
            predicate: Any = self._parser.parse(text)
        except UnexpectedInput as error:
            raise ApiError("INVALID_ARGUMENT", f"invalid filter {text!r}: {self._explain(error)}") from error
        except ValueError as error:
            raise ApiError("INVALID_ARGUMENT", f"invalid filter {text!r}: {error}") from error
        return predicate  # type: ignore[no-any-return]

    @cached_property
    def _parser(self) -> Lark:
        """Built for the first filter: most runs of the stack use none."""
        return Lark(self._grammar + _BASE, parser="lalr", transformer=self._meaning)

    def _explain(self, error: UnexpectedInput) -> str:
        names: set[str] = set()
        if isinstance(error, UnexpectedToken):
            names = error.accepts or error.expected
        elif isinstance(error, UnexpectedCharacters):
            names = error.allowed or set()
        expected = sorted(self._word(name) for name in names) or ["the end"]
        is_end = isinstance(error, UnexpectedToken) and error.token.type == "$END"
        return f"expected {' or '.join(expected)} at {'its end' if is_end else f'offset {error.pos_in_stream}'}"

    def _word(self, name: str) -> str:
        """A terminal as a reader knows it: its text for a sign or a keyword (`_NAME: /name(?!…)/`), else its name."""
        if name == "$END":
            return "the end"
        pattern = self._parser.get_terminal(name).pattern
        if pattern.type == "str":
            return repr(pattern.value)
        return pattern.value.partition("(?!")[0] if name.startswith("_") else name


@v_args(inline=True)
class Meaning(Transformer):  # type: ignore[type-arg]
    """The predicates of AND, OR and NOT. A method raises ValueError for a value that the language refuses."""

    def all_of(self, *parts: Predicate) -> Predicate:
        return lambda item: all(part(item) for part in parts)

    def any_of(self, *parts: Predicate) -> Predicate:
        return lambda item: any(part(item) for part in parts)

    def negation(self, part: Predicate) -> Predicate:
        return lambda item: not part(item)
