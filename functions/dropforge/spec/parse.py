"""Parse the bytes of an uploaded document into a job spec, or list every problem of the document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import Any, NoReturn

from pydantic import JsonValue, ValidationError

from dropforge.base.errors import InvalidSpec, SpecProblem
from dropforge.base.redact import TOKEN, cut

from . import foreign, registry
from .job import JobSpec
from .parts import Wrong, shown, words_of

MAX_SPEC_BYTES = 256 * 1024
# For each spec: all problems must fit a run event, and a function must list them within its time-out.
MAX_PROBLEMS = 50


def parse_spec(data: bytes) -> JobSpec:
    """A valid spec from the bytes of a JSON document. Raises InvalidSpec that lists every problem."""
    document = _parse_json(data)
    if not isinstance(document, dict):
        raise InvalidSpec([SpecProblem("", "a job spec is a JSON object", shown(document), "an object")])
    if literal := [*islice(_literal_secrets("", document), MAX_PROBLEMS)]:
        raise InvalidSpec(literal)
    try:
        # Validated as JSON, so that strict mode accepts the values of JSON (1 for a float, lists) and no other values.
        return JobSpec.model_validate_json(json.dumps(document))
    except ValidationError as error:
        # A default that depends on another field is missing where that field is wrong.
        errors = [e for e in error.errors(include_url=False) if e["type"] != "default_factory_not_called"]
        problems = _merged([_problem(dict(e), document) for e in errors[:MAX_PROBLEMS]])
        if len(errors) > MAX_PROBLEMS:
            problems.append(SpecProblem("", f"{len(errors) - MAX_PROBLEMS} more problems, which are not listed"))
        raise InvalidSpec(problems) from None


def forget_platforms() -> None:
    """Read the registry of platforms anew at the next use, after the environment has changed."""
    registry.platforms.cache_clear()
    schema.cache_clear()
    field_places.cache_clear()
    JobSpec.model_rebuild(force=True)


def _parse_json(data: bytes) -> JsonValue:
    if len(data) > MAX_SPEC_BYTES:
        raise InvalidSpec(
            [SpecProblem("", "the spec is too large", f"{len(data)} bytes", f"at most {MAX_SPEC_BYTES} bytes")]
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        present = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise InvalidSpec([SpecProblem("", "the spec is not UTF-8 text", present, "JSON encoded as UTF-8")]) from None
    try:
        document: JsonValue = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_number
        )
        json.dumps(document, ensure_ascii=False).encode()  # a lone "\ud800" is not text
        return document
    except UnicodeEncodeError as error:
        present = f"\\u{ord(error.object[error.start]):04x}"
        raise InvalidSpec([SpecProblem("", "half of a surrogate pair", present, "whole characters")]) from None
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise InvalidSpec([SpecProblem("", "the spec is not JSON", where, "a JSON object")]) from None
    except RecursionError:
        raise InvalidSpec([SpecProblem("", "the spec is nested too deeply", None, "a job spec")]) from None
    except ValueError as error:
        raise InvalidSpec([SpecProblem("", cut(str(error), 300), None, "plain JSON")]) from None


def _unique_keys(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} appears twice in an object")
    return result


def _number(text: str) -> int | float:
    """A number with a point or an exponent. JSON Schema treats 1.0 and 1e3 as integers, and so do job specs."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_NAMES = "the name of a Secret Manager secret (see `secrets`); revoke the credential, it has been stored"
_LENGTH = re.compile(r"(\w+) should have (.+?)(?: after validation)?(?:, not \S+)?")


def _literal_secrets(pointer: str, value: JsonValue) -> Iterator[SpecProblem]:
    """Every string that looks like a credential; a problem never repeats the credential."""
    if isinstance(value, dict):
        for key, item in value.items():
            if TOKEN.search(key):
                present = f"a secret-like field name of {len(key)} characters"
                yield SpecProblem(
                    pointer, "a field name looks like a credential; a spec never holds a credential", present, _NAMES
                )
            else:
                yield from _literal_secrets(f"{pointer}/{_escape(key)}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _literal_secrets(f"{pointer}/{index}", item)
    elif isinstance(value, str) and TOKEN.search(value):
        yield SpecProblem(
            pointer,
            "this looks like a credential; a spec never holds a credential",
            f"a secret-like string of {len(value)} characters",
            _NAMES,
        )


def _problem(error: dict[str, Any], document: JsonValue) -> SpecProblem:
    """A pydantic error as a problem: the place, the present value, the expected value."""
    kind, context = error["type"], error.get("ctx", {})
    steps = _document_path(error["loc"], document, missing=kind == "missing")
    pointer = "".join(f"/{_escape(str(step))}" for step in steps)
    if kind == "extra_forbidden":
        return _unknown(pointer, shown(error["input"]), steps, document)
    if kind == "missing":
        return SpecProblem(pointer, "a required field is missing", "nothing", "a value")
    if kind in ("union_tag_invalid", "literal_error"):
        present = context.get("tag", error["input"])
        pointer += f"/{context['discriminator'].strip(chr(39))}" if "discriminator" in context else ""
        return SpecProblem(
            pointer, "unknown value", shown(present), context.get("expected_tags") or context.get("expected")
        )
    if kind == "union_tag_not_found":
        return SpecProblem(f"{pointer}/type", "a required field is missing", "nothing", "a type")
    if kind == "value_error" and isinstance(wrong := context["error"], Wrong):
        return wrong.problem._replace(pointer=pointer + wrong.problem.pointer)
    if kind == "string_pattern_mismatch":
        return SpecProblem(pointer, "malformed value", shown(error["input"]), words_of(context["pattern"]))
    if error["msg"].startswith("Input should be "):
        message = "wrong type" if kind.endswith("_type") else "wrong value"
        expected = error["msg"].removeprefix("Input should be ")
        if kind == "string_type":
            expected = _text_in_words(steps, document)
        return SpecProblem(pointer, message, shown(error["input"]), expected)
    length = _LENGTH.fullmatch(error["msg"])
    expected = f"a {length[1].lower()} of {length[2]}" if length else "a value that the schema of a job spec allows"
    return SpecProblem(pointer, error["msg"], shown(error["input"]), expected)


def _merged(problems: list[SpecProblem]) -> list[SpecProblem]:
    """Merge the problems of a place: pydantic reports a value that fits no branch of a union for each branch."""
    merged: dict[tuple[str, str | None], SpecProblem] = {}
    for problem in problems:
        first = merged.setdefault((problem.pointer, problem.found), problem)
        if first is not problem and first.expected and problem.expected:
            merged[problem.pointer, problem.found] = first._replace(expected=f"{first.expected} or {problem.expected}")
    return list(merged.values())


def _document_path(loc: tuple[str | int, ...], document: JsonValue, missing: bool) -> list[str | int]:
    """pydantic's location without the union tags that it adds (`lora`, `list[str]`), that is, a path in the document.

    If a field is missing, the last step does not exist in the document.
    """
    path: list[str | int] = []
    here: Any = document
    for step in loc[:-1] if missing else loc:
        if (isinstance(here, dict) and step in here) or (isinstance(here, list) and isinstance(step, int)):
            here = here[step]  # type: ignore[index]
            path.append(step)
    return [*path, loc[-1]] if missing else path


def _unknown(pointer: str, found: str, path: list[str | int], document: JsonValue) -> SpecProblem:
    """The problem of an unknown field: why its name is refused, or the field that it may mean."""
    name = str(path[-1])
    if name in foreign.REFUSED:
        reason, advice = foreign.REFUSED[name]
        return SpecProblem(pointer, f"dropforge has no such setting: {reason}", found, advice)
    if field := foreign.TAKEN.get(name):
        return SpecProblem(pointer, "unknown field", found, f"{field!r}, which is its name in a job spec")
    places = [place for place in field_places() if place.rpartition(".")[2] == name]
    if len(places) == 1:
        return SpecProblem(pointer, "unknown field", found, f"{places[0]!r}, its place in a job spec")
    return SpecProblem(pointer, "unknown field", found, _field_names(path, document))


@cache
def field_places() -> tuple[str, ...]:
    """Every field of a job spec by its path, such as "training.adapter.r", without those below lists."""
    return tuple(dict.fromkeys(_places(schema(), "")))


def _places(node: dict[str, Any], path: str) -> Iterator[str]:
    for branch in _resolve(node, None):  # whatever its `type` is
        for name, field in branch.get("properties", {}).items():
            place = f"{path}.{name}" if path else name
            yield place
            yield from _places(field, place)


def _field_names(path: list[str | int], document: JsonValue) -> str:
    """The names allowed beside an unknown field, the likeliest first."""
    allowed = sorted({name for node in _nodes(path[:-1], document) for name in node.get("properties", {})})
    close = get_close_matches(cut(str(path[-1]), 64), allowed, n=1)
    listing = ", ".join(allowed)
    return f"{close[0]!r}? The fields here are {listing}" if close else f"one of {listing}"


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of a job spec."""
    return JobSpec.model_json_schema(by_alias=True)


def _text_in_words(path: list[str | int], document: JsonValue) -> str:
    """A description of the text that the schema expects at a path of the document."""
    patterns = {node["pattern"] for node in _nodes(path, document) if "pattern" in node}
    return " or ".join(f"text: {words_of(pattern)}" for pattern in sorted(patterns)) or "text in quotes"


def _nodes(path: list[str | int], document: JsonValue) -> list[dict[str, Any]]:
    """The parts of the schema that describe the value at a path of the document.

    Of a union they are the branch that the value's `type` names, or every branch.
    """
    nodes, here = [schema()], document
    for step in [*path, None]:
        nodes = [resolved for node in nodes for resolved in _resolve(node, here)]
        if step is not None:
            here = _at(here, step)
            nodes = [
                node["items"] if isinstance(step, int) else node["properties"][step]
                for node in nodes
                if ("items" in node if isinstance(step, int) else step in node.get("properties", {}))
            ]
    return nodes


def _at(value: JsonValue, step: str | int) -> JsonValue:
    if isinstance(value, list) and isinstance(step, int):
        return value[step]
    return value.get(str(step)) if isinstance(value, dict) else None


def _resolve(node: dict[str, Any], value: JsonValue) -> list[dict[str, Any]]:
    if "$ref" in node:
        return _resolve(schema()["$defs"][node["$ref"].rsplit("/", 1)[1]], value)
    branches = node.get("anyOf") or node.get("oneOf")
    if "discriminator" in node and isinstance(value, dict):
        named = value.get(node["discriminator"]["propertyName"])
        reference = node["discriminator"]["mapping"].get(named) if isinstance(named, str) else None
        branches = [{"$ref": reference}] if reference else branches
    return [r for branch in branches for r in _resolve(branch, value)] if branches else [node]


def _escape(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")
