"""The filter language compared with a naive evaluator, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge_local.base.errors import ApiError
from dropforge_local.emulators.pubsub.filters import compile_filter

KEYS = st.sampled_from(["a", "kind", "run-id", "x_1", "with space", "日本", 'q"uote', "AND", "attributes"])
VALUES = st.sampled_from(["", "v", "value", 'quo"te', "back\\slash", "日本", "line\nbreak", "OR"])
Tree = tuple[Any, ...]

PREDICATES = st.one_of(
    st.tuples(st.just("has"), KEYS),
    st.tuples(st.sampled_from(["=", "!=", "prefix"]), KEYS, VALUES),
)
TREES = st.recursive(
    PREDICATES,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), st.lists(inner, min_size=2, max_size=3)),
    ),
    max_leaves=5,
)


def write(tree: Tree, draw: st.DrawFn) -> str:
    """The tree as filter text, with random choices wherever the syntax allows several forms."""
    space = draw(st.sampled_from(["", " ", "  "]))
    match tree:
        case ("has", key):
            return f"attributes{space}:{space}{write_key(key, draw)}"
        case ("prefix", key, value):
            return f"hasPrefix({space}attributes.{write_key(key, draw)},{space}{quote(value)})"
        case ("=" | "!=" as operator, key, value):
            return f"attributes.{write_key(key, draw)}{space}{operator}{space}{quote(value)}"
        case ("not", inner):
            return draw(st.sampled_from(["NOT ", "-"])) + f"({write(inner, draw)})"
        case (joint, terms):
            return f" {joint.upper()} ".join(f"({write(term, draw)})" for term in terms)
    raise AssertionError(tree)


def write_key(key: str, draw: st.DrawFn) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare and draw(st.booleans()) else quote(key)


def quote(text: str) -> str:
    return json.dumps(text)


def judge(tree: Tree, attributes: Mapping[str, str]) -> bool:
    match tree:
        case ("has", key):
            return key in attributes
        case ("prefix", key, value):
            return key in attributes and attributes[key].startswith(value)
        case ("=", key, value):
            return bool(attributes.get(key) == value)
        case ("!=", key, value):
            return bool(attributes.get(key) != value)
        case ("not", inner):
            return not judge(inner, attributes)
        case ("and", terms):
            return all(judge(term, attributes) for term in terms)
        case ("or", terms):
            return any(judge(term, attributes) for term in terms)
    raise AssertionError(tree)


@st.composite
def filters(draw: st.DrawFn) -> tuple[str, Tree]:
    tree = draw(TREES)
    return write(tree, draw), tree


@given(filters().filter(lambda pair: len(pair[0].encode()) <= 256), st.dictionaries(KEYS, VALUES, max_size=5))
def test_filter_agrees_with_a_naive_evaluator(pair: tuple[str, Tree], attributes: dict[str, str]) -> None:
    text, tree = pair
    assert compile_filter(text)(attributes) == judge(tree, attributes)


@given(st.text(max_size=80) | st.text('attributes.:="()- ANDORT\\', max_size=60))
def test_any_text_is_a_filter_or_refused(text: str) -> None:
    try:
        predicate = compile_filter(text)
    except ApiError as refusal:
        status = refusal.status
    else:
        status = str(predicate({"a": "b"}))
    assert status in ("INVALID_ARGUMENT", "True", "False")


@pytest.mark.parametrize(
    ("text", "attributes", "expected"),
    [
        ("", {}, True),
        ('attributes.name != "com"', {}, True),
        ("NOT attributes:name", {"name": ""}, False),
        ('attributes.name = "com" AND -attributes:"lang"', {"name": "com"}, True),
        (r'attributes:"\u65e5\x41\101\t"', {"日AA\t": ""}, True),
        ("NOT NOT attributes:a", {"a": ""}, True),
        ("(" * 100 + "attributes:a" + ")" * 100, {"a": ""}, True),
        ("attributes:a AND NOT attributes:b", {"a": ""}, True),
    ],
)
def test_documented_examples(text: str, attributes: dict[str, str], expected: bool) -> None:
    assert compile_filter(text)(attributes) is expected


@pytest.mark.parametrize(
    "text",
    [
        "attributes",
        "attributes.a",
        "attributes.a = b",
        "attributes.a = 'b'",
        "attributes.a == \"b\"",
        "attributes.a > \"b\"",
        "attributes:a attributes:b",
        "attributes:a and attributes:b",
        "attributes:a AND attributes:b OR attributes:c",
        "attributes:a AND",
        "(attributes:a",
        "attributes:a)",
        "data = \"x\"",
        'hasPrefix(attributes.a)',
        'hasPrefix(a, "b")',
        'attributes.a = "unterminated',
        r'attributes.a = "\q"',
        r'attributes.a = "\ud800"',
        "attributes.a/b = \"c\"",
        'attributes.a = "' + "x" * 250 + '"',
        "NOT",
        "(" * 256,
    ],
)  # fmt: skip
def test_invalid_filters_are_refused(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        compile_filter(text)
    assert refused.value.status == "INVALID_ARGUMENT"
