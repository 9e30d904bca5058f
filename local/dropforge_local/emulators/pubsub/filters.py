"""Pub/Sub's filter language: which messages a subscription receives, judged by their attributes.

    expression := term { "AND" term } | term { "OR" term }        mixing the two takes parentheses
    term       := [ "NOT" | "-" ] term | "(" expression ")" | predicate
    predicate  := "attributes" ":" key
                | "attributes" "." key ( "=" | "!=" ) string
                | "hasPrefix" "(" "attributes" "." key "," string ")"

Words are case-sensitive. A key is a string, or bare when it is letters, digits, "-" and "_".
(https://cloud.google.com/pubsub/docs/subscription-message-filter)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from dropforge_local.base.errors import ApiError

Predicate = Callable[[Mapping[str, str]], bool]
MAX_FILTER_BYTES = 256
TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<word>[A-Za-z0-9_][A-Za-z0-9_-]*)|(?P<sign>!=|[-:.=(),]))"""
)
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|(.))", re.DOTALL)
SIMPLE_ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", '"': '"', "'": "'", "?": "?", "`": "`",
}  # fmt: skip


@lru_cache(maxsize=256)
def compile_filter(text: str) -> Predicate:
    """The predicate that `text` means; an empty filter matches everything. Raises INVALID_ARGUMENT."""
    if len(text.encode()) > MAX_FILTER_BYTES:
        raise ApiError("INVALID_ARGUMENT", f"filter is {len(text.encode())} bytes; the limit is {MAX_FILTER_BYTES}")
    if not text:
        return lambda attributes: True
    return _Parser(text).parse()


class _Parser:
    """Recursive descent; the 256-byte limit bounds its depth."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = self._tokenize()
        self.position = 0

    def parse(self) -> Predicate:
        predicate = self._expression()
        if self._peek():
            raise self._error("expected the end, AND or OR (mixing AND and OR takes parentheses)")
        return predicate

    def _tokenize(self) -> list[str]:
        tokens, end = [], len(self.text.rstrip())
        position = 0
        while position < end:
            match = TOKEN.match(self.text, position)
            if match is None:
                raise ApiError("INVALID_ARGUMENT", f"invalid filter {self.text!r}: unreadable at offset {position}")
            tokens.append(match[match.lastgroup or 0])
            position = match.end()
        return tokens

    def _expression(self) -> Predicate:
        terms = [self._term()]
        joint = self._peek()
        while joint in ("AND", "OR") and self._peek() == joint:
            self.position += 1
            terms.append(self._term())
        if len(terms) == 1:
            return terms[0]
        if joint == "OR":
            return lambda attributes: any(term(attributes) for term in terms)
        return lambda attributes: all(term(attributes) for term in terms)

    def _term(self) -> Predicate:
        token = self._take()
        if token in ("NOT", "-"):
            inner = self._term()
            return lambda attributes: not inner(attributes)
        if token == "(":
            inner = self._expression()
            self._expect(")")
            return inner
        if token == "attributes":
            return self._comparison()
        if token == "hasPrefix":
            return self._has_prefix()
        raise self._error("expected attributes, hasPrefix, NOT or '('", back=1)

    def _comparison(self) -> Predicate:
        if self._peek() == ":":
            self.position += 1
            key = self._key()
            return lambda attributes: key in attributes
        key = self._attribute_key()
        operator = self._take()
        if operator not in ("=", "!="):
            raise self._error("expected = or !=", back=1)
        value = self._string()
        # A message without the attribute satisfies !=, as NOT (attributes.key = "value") does.
        if operator == "=":
            return lambda attributes: attributes.get(key) == value
        return lambda attributes: attributes.get(key) != value

    def _has_prefix(self) -> Predicate:
        self._expect("(")
        self._expect("attributes")
        key = self._attribute_key()
        self._expect(",")
        prefix = self._string()
        self._expect(")")
        return lambda attributes: key in attributes and attributes[key].startswith(prefix)

    def _attribute_key(self) -> str:
        self._expect(".")
        return self._key()

    def _key(self) -> str:
        token = self._peek()
        if token.startswith('"'):
            return self._string()
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", token):
            raise self._error("expected an attribute's key")
        self.position += 1
        return token

    def _string(self) -> str:
        token = self._take()
        if not token.startswith('"'):
            raise self._error("expected a string in double quotes", back=1)
        return ESCAPE.sub(self._unescape, token[1:-1])

    def _unescape(self, escape: re.Match[str]) -> str:
        *codes, octal, simple = escape.groups()
        digits = next(filter(None, codes), None)
        code = int(digits, 16) if digits else int(octal, 8) if octal else None
        if code is not None and code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
            return chr(code)
        if code is None and simple in SIMPLE_ESCAPES:
            return SIMPLE_ESCAPES[simple]
        raise ApiError("INVALID_ARGUMENT", f"invalid filter {self.text!r}: unknown escape {escape[0]!r}")

    def _peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self.position += 1
        return token

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise self._error(f"expected {token!r}", back=1)

    def _error(self, expectation: str, back: int = 0) -> ApiError:
        position = self.position - back
        found = repr(self.tokens[position]) if position < len(self.tokens) else "the end"
        return ApiError("INVALID_ARGUMENT", f"invalid filter {self.text!r}: {expectation}, found {found}")
