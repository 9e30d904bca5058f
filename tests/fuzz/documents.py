"""Random documents: valid by a JSON Schema, nearly valid, and malformed."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
ODD_TEXT = [
    "",
    "\u0000",
    "\ud800",
    "é\u202e",
    "../../x",
    "<!channel>",
    "${x}",
    "a" * 5000,
    "hf_" + "Canary" * 4,
    "gs://",
]
ODD_NUMBERS = [0, -1, 1.0, 32.0, 10**400, 10**30, -(10**30), 1e308, float("nan"), float("inf"), -float("inf"), 0.1]
odd_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.sampled_from(ODD_NUMBERS) | st.sampled_from(ODD_TEXT) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def from_schema(schema: Schema) -> st.SearchStrategy[Any]:
    """Values that a schema of pydantic allows. Rules that a JSON Schema cannot express are ignored."""
    return _values(schema, schema)


def _values(root: Schema, node: Schema) -> st.SearchStrategy[Any]:
    if "$ref" in node:
        definition = root["$defs"][node["$ref"].rsplit("/", 1)[1]]
        return st.deferred(lambda: _values(root, definition))
    if branches := node.get("anyOf") or node.get("oneOf"):
        return st.one_of([_values(root, branch) for branch in branches])
    if "const" in node:
        return st.just(node["const"])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    return _typed(root, node)


def _typed(root: Schema, node: Schema) -> st.SearchStrategy[Any]:
    kind = node.get("type")
    if kind == "object":
        return _objects(root, node)
    if kind == "array":
        return st.lists(
            _values(root, node["items"]), min_size=node.get("minItems", 0), max_size=node.get("maxItems", 3)
        )
    if kind == "string":
        return _strings(node)
    if kind == "integer":
        low = int(node["minimum"] if "minimum" in node else node.get("exclusiveMinimum", 0))
        return st.integers(low + ("exclusiveMinimum" in node), int(node.get("maximum", 10**6)))
    if kind == "number":
        return st.floats(
            node.get("minimum", node.get("exclusiveMinimum")),
            node.get("maximum", node.get("exclusiveMaximum")),
            allow_nan=False,
            allow_infinity=False,
            exclude_min="exclusiveMinimum" in node,
            exclude_max="exclusiveMaximum" in node,
        )
    return {"boolean": st.booleans(), "null": st.none()}.get(kind or "", odd_values)


def _strings(node: Schema) -> st.SearchStrategy[str]:
    if "pattern" in node:
        return st.from_regex(node["pattern"].removesuffix("$") + r"\Z", fullmatch=True)
    return st.sampled_from(["owner/name", "gs://bucket/path", "x"]) | st.text(
        min_size=node.get("minLength", 0), max_size=min(node.get("maxLength", 20), 20)
    )


def _objects(root: Schema, node: Schema) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: _values(root, part) for name, part in node.get("properties", {}).items()}
    required = {name: fields.pop(name) for name in node.get("required", ())}
    more = node.get("additionalProperties")
    if not isinstance(more, dict):
        return st.fixed_dictionaries(required, optional=fields)
    keys = _strings(node.get("propertyNames", {}))
    return st.dictionaries(keys, _values(root, more), max_size=min(node.get("maxProperties", 3), 3))


@st.composite
def mutated(draw: st.DrawFn, documents: list[Any]) -> Any:
    """A copy of one document with one to three values replaced, removed or added."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, 3))):
        known = list(places(document))
        if not known:
            break
        container, key = draw(st.sampled_from(known))
        change = draw(st.sampled_from(["replace", "remove", "add", "swap"]))
        if change == "replace":
            container[key] = draw(odd_values)
        elif change == "swap":
            container[key] = copy.deepcopy(draw(st.sampled_from([other[name] for other, name in known])))
        elif change == "add" and isinstance(container, dict):
            elsewhere = [name for _, name in known if isinstance(name, str)]
            odd = ["__proto__", "type", "$ref", "hf_" + "Canary" * 4]
            container[draw(st.text(max_size=8) | st.sampled_from([*odd, *elsewhere]))] = draw(odd_values)
        else:
            del container[key]
    return document


@st.composite
def torn(draw: st.DrawFn, documents: list[Any]) -> bytes:
    """The bytes of a document after one change: cut, doubled, inserted or replaced bytes."""
    data = bytearray(json.dumps(draw(st.sampled_from(documents))).encode())
    place = draw(st.integers(0, len(data) - 1))
    change = draw(st.sampled_from(["cut", "flip", "double", "insert"]))
    if change == "cut":
        return bytes(data[:place])
    if change == "double":
        return bytes(data + data[place:])
    if change == "insert":
        return bytes(data[:place] + draw(st.binary(max_size=4)) + data[place:])
    data[place] = draw(st.integers(0, 255))
    return bytes(data)


def places(node: Any) -> Any:
    """Yield every (container, key) of a document, at any depth."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(items):
        yield node, key
        yield from places(value)
