"""Pub/Sub's filter language: which messages a subscription receives, judged by their attributes.

Mixing AND and OR takes parentheses. Words are case-sensitive. A key is a string, or bare when it consists of letters,
digits, "-" and "_" (https://cloud.google.com/pubsub/docs/subscription-message-filter).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from lark import v_args

from dropforge_local.base.errors import ApiError

from ..kit.filters import Language, Meaning

Predicate = Callable[[Mapping[str, str]], bool]
MAX_FILTER_BYTES = 256
GRAMMAR = r"""
    ?start: expression
    ?expression: term | term (_AND term)+ -> all_of | term (_OR term)+ -> any_of
    ?term: (_NOT | "-") term -> negation
         | "(" expression ")"
         | _ATTRIBUTES ":" key -> has
         | _ATTRIBUTES "." key "=" string -> equals
         | _ATTRIBUTES "." key "!=" string -> differs
         | _HAS_PREFIX "(" _ATTRIBUTES "." key "," string ")" -> has_prefix
    ?key: KEY | string
    string: STRING

    KEY: /[A-Za-z0-9_][A-Za-z0-9_-]*/
    STRING: /"(?:[^"\\]|\\.)*"/s
    _AND: /AND(?![\w-])/
    _OR: /OR(?![\w-])/
    _NOT: /NOT(?![\w-])/
    _ATTRIBUTES: /attributes(?![\w-])/
    _HAS_PREFIX: /hasPrefix(?![\w-])/
"""
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|(.))", re.DOTALL)
SIMPLE_ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", '"': '"', "'": "'", "?": "?", "`": "`",
}  # fmt: skip


@lru_cache(maxsize=256)
def compile_filter(text: str) -> Predicate:
    """The predicate of a filter; an empty filter matches every message. Raises INVALID_ARGUMENT."""
    if len(text.encode()) > MAX_FILTER_BYTES:
        raise ApiError("INVALID_ARGUMENT", f"filter is {len(text.encode())} bytes; the limit is {MAX_FILTER_BYTES}")
    return LANGUAGE.compile(text) if text else lambda attributes: True


@v_args(inline=True)
class _OfAttributes(Meaning):
    def string(self, token: str) -> str:
        return ESCAPE.sub(_unescape, token[1:-1])

    def has(self, key: str) -> Predicate:
        return lambda attributes: key in attributes

    def equals(self, key: str, value: str) -> Predicate:
        return lambda attributes: attributes.get(key) == value

    def differs(self, key: str, value: str) -> Predicate:
        # A message without the attribute satisfies !=, as NOT (attributes.key = "value") does.
        return lambda attributes: attributes.get(key) != value

    def has_prefix(self, key: str, prefix: str) -> Predicate:
        return lambda attributes: key in attributes and attributes[key].startswith(prefix)


LANGUAGE = Language(GRAMMAR, _OfAttributes())


def _unescape(escape: re.Match[str]) -> str:
    *codes, octal, simple = escape.groups()
    digits = next(filter(None, codes), None)
    code = int(digits, 16) if digits else int(octal, 8) if octal else None
    if code is not None and code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
        return chr(code)
    if code is None and simple in SIMPLE_ESCAPES:
        return SIMPLE_ESCAPES[simple]
    raise ValueError(f"unknown escape {escape[0]!r}")
