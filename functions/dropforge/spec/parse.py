"""Parse the bytes of an uploaded document into a job spec, or list every problem of the document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import Any, NoReturn, TypeVar

from pydantic import JsonValue, ValidationError

from dropforge.base.errors import InvalidSpec, SpecProblem
from dropforge.base.redact import TOKEN, cut

from . import foreign, registry, syntax
from .guess import likeliest, one_of, plain
from .job_spec import JobSpec
from .metrics import meant_share
from .parts import Part, Wrong, corrected, shown, words_of
from .sections import Training

MAX_SPEC_BYTES = 256 * 1024
# For each spec: all problems must fit a run event, and a function must list them within its time-out.
MAX_PROBLEMS = 50
P = TypeVar("P", bound=Part)


def parse_spec(data: bytes) -> JobSpec:
    """A valid spec from the bytes of a JSON document. Raises InvalidSpec that lists every problem."""
    document = _parse_json(data)
    if not isinstance(document, dict):
        expected = _UNWRAPPED.get(type(document), "an object")
        raise InvalidSpec([SpecProblem("", "a job spec is a JSON object", shown(document), expected)])
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


def read_part(part: type[P], value: JsonValue, *place: str) -> P:
    """A part of a spec that a message holds. `place` is where a spec has it. Raises InvalidSpec."""
    try:
        return part.model_validate_json(json.dumps(value))
    except ValidationError as error:
        document: JsonValue = value
        for step in reversed(place):
            document = {step: document}
        errors = [{**each, "loc": (*place, *each["loc"])} for each in error.errors(include_url=False)]
        inside = len("".join(f"/{step}" for step in place[:-1]))
        problems = _merged([_problem(each, document) for each in errors[:MAX_PROBLEMS]])
        raise InvalidSpec([each._replace(pointer=each.pointer[inside + 1 :]) for each in problems]) from None


def forget_platforms() -> None:
    """Read the registries of platforms and methods anew at the next use, after one of them has changed."""
    registry.platforms.cache_clear()
    schema.cache_clear()
    field_places.cache_clear()
    Training.model_rebuild(force=True)
    JobSpec.model_rebuild(force=True)


def _parse_json(data: bytes) -> JsonValue:
    if len(data) > MAX_SPEC_BYTES:
        raise InvalidSpec(
            [SpecProblem("", "the spec is too large", f"{len(data)} bytes", f"at most {MAX_SPEC_BYTES} bytes")]
        )
    if problem := syntax.not_text(data):
        raise InvalidSpec([problem])
    text = data.decode("utf-8-sig")
    try:
        document: JsonValue = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
            parse_float=_number,
            parse_int=_whole_number,
        )
        json.dumps(document, ensure_ascii=False).encode()  # a lone "\ud800" is not text
        return document
    except UnicodeEncodeError as error:
        present = f"\\u{ord(error.object[error.start]):04x}"
        raise InvalidSpec([SpecProblem("", "half of a surrogate pair", present, "whole characters")]) from None
    except json.JSONDecodeError as error:
        raise InvalidSpec([syntax.not_json(text, error)]) from None
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


def _whole_number(text: str) -> int:
    """A whole number. One of thousands of digits is above every limit with the first of them, too."""
    return int(text[:_MOST_DIGITS])


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_NAMES = "the name of a Secret Manager secret (see `secrets`); revoke the credential, it has been stored"
_MOST_DIGITS = 400  # a float has at most 309; Python reads no more than 4,300
_UNWRAPPED: dict[type, str] = {
    str: "the object itself: it was encoded twice, once as a text",
    list: "the object itself: a list holds it, and a file has one spec",
}
# Types in place of pydantic's words, by the kind of its error.
_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
}
_OBJECTS = ("model_type", "model_attributes_type", "dict_type")
_OFF = (False, 0, "", "none", "null", "no", "off", "false")


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
    pointer, value = "".join(f"/{_escape(str(step))}" for step in steps), error["input"]
    if kind == "extra_forbidden":
        return _unknown(pointer, shown(value), steps, document)
    if kind == "missing":
        return SpecProblem(pointer, "a required field is missing", "nothing", _missing_in_words(steps, document))
    if kind in ("union_tag_invalid", "literal_error"):
        present = context.get("tag", value)
        pointer += f"/{context['discriminator'].strip(chr(39))}" if "discriminator" in context else ""
        names = re.findall("'([^']*)'", context.get("expected_tags") or context["expected"])
        return SpecProblem(pointer, "unknown value", shown(present), one_of(present, names))
    if kind == "union_tag_not_found":
        tags = one_of(None, _tags(_fields(steps, document)))
        return SpecProblem(f"{pointer}/type", "a required field is missing", "nothing", f"a type: {tags}")
    if kind == "value_error" and isinstance(wrong := context["error"], Wrong):
        return wrong.problem._replace(pointer=pointer + wrong.problem.pointer)
    if kind == "string_pattern_mismatch":
        meant, words = corrected(context["pattern"], value), words_of(context["pattern"])
        expected = f"did you mean {meant!r}? {words[0].upper()}{words[1:]}" if meant else words
        return SpecProblem(pointer, "malformed value", shown(value), expected)
    if kind in _OBJECTS:
        return SpecProblem(pointer, "wrong type", shown(value), _object_in_words(steps, document, value))
    if kind.endswith(("too_long", "too_short")):
        return _wrong_length(pointer, kind, value, context)
    message = "wrong type" if kind.endswith("_type") else "wrong value"
    return SpecProblem(pointer, message, shown(value), _value_in_words(error, steps, document))


def _wrong_length(pointer: str, kind: str, value: Any, context: dict[str, Any]) -> SpecProblem:
    """The problem of a text, a list or a mapping with too many or too few characters or entries."""
    unit = "characters" if isinstance(value, str) else "entries"
    word, bound = ("many", "most") if kind.endswith("long") else ("few", "least")
    limit = context["max_length" if word == "many" else "min_length"]
    found = f"{len(value)} {unit}" if word == "many" else shown(value)
    return SpecProblem(pointer, f"too {word} {unit}", found, f"at {bound} {limit} {unit}")


def _value_in_words(error: dict[str, Any], steps: list[str | int], document: JsonValue) -> str:
    """A description of the number, the text or the list that must be in place of a value."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "string_type":
        return _text_in_words(steps, document)
    expected = _TYPES.get(kind, error["msg"].removeprefix("Input should be "))
    if kind == "list_type":
        return f"a list: [{shown(value)}]" if isinstance(value, str | dict) else expected
    if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?([eE]-?\d+)?|true|false", value):
        return f"{expected}, without quotes"
    is_share = 0.5 <= context.get("le", context.get("lt", 0)) <= 1
    meant = meant_share(value) if is_share else ""
    return f"{meant} It must be {expected}" if meant else expected


def _object_in_words(steps: list[str | int], document: JsonValue, value: Any) -> str:
    """A description of the object that must be in place of another value, with that value where it is clear."""
    fields = _fields(steps, document)
    if value in _OFF and any(_takes_null(field) for field in fields):
        return 'null: without quotes, and in place of false or "none"'
    if tags := _tags(fields):
        if value in _OFF and "none" in tags:
            value = "none"
        near = likeliest(value, tags)
        return f'did you mean {{"type": "{near[0]}"}}?' if near else f"an object with a type: {one_of(None, tags)}"
    for node in _nodes(steps, document):
        required = [name for name in node.get("required", ()) if name != "type"]
        if isinstance(value, str) and len(required) == 1 and "type" not in node["properties"]:
            return f'did you mean {{"{required[0]}": {shown(value)}}}?'
    names = sorted({name for node in _nodes(steps, document) for name in node.get("properties", {})})
    return f"an object with fields of {', '.join(names)}" if names else "an object"


def _missing_in_words(steps: list[str | int], document: JsonValue) -> str:
    """A description of a field that is missing."""
    fields = _fields(steps, document)
    tags = _tags(fields)
    null = "null, or " if any(map(_takes_null, fields)) else ""
    return f"{null}an object with a type: {one_of(None, tags)}" if tags else f"{null}a value"


def _fields(steps: list[str | int], document: JsonValue) -> list[dict[str, Any]]:
    """The parts of the schema that describe the value at a path, whatever its `type` is."""
    if not steps:
        return [schema()]
    *path, last = steps
    nodes = _nodes(path, document)
    if isinstance(last, int):
        return [node["items"] for node in nodes if "items" in node]
    return [node["properties"][last] for node in nodes if last in node.get("properties", {})]


def _tags(fields: list[dict[str, Any]]) -> list[str]:
    """The values of `type` from which parts of a spec are chosen."""
    found: list[str] = []
    for node in fields:
        if "discriminator" in node:
            found += node["discriminator"]["mapping"]
        else:
            found += _tags([*node.get("anyOf", ()), *node.get("oneOf", ())])
    return list(dict.fromkeys(found))


def _takes_null(field: dict[str, Any]) -> bool:
    return {"type": "null"} in field.get("anyOf", ())


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
    written = str(path[-1])
    name = plain(written).replace("-", "_")  # learningRate, learning-rate
    allowed = sorted({each for node in _nodes(path[:-1], document) for each in node.get("properties", {})})
    if name in allowed:
        return SpecProblem(pointer, "unknown field", found, one_of(written, allowed))
    if name in foreign.REFUSED:
        reason, advice = foreign.REFUSED[name]
        return SpecProblem(pointer, f"dropforge has no such setting: {reason}", found, advice)
    if field := foreign.TAKEN.get(name):
        return SpecProblem(pointer, "unknown field", found, f"{field!r}, which is its name in a job spec")
    places = [place for place in field_places() if place.rpartition(".")[2] == name]
    inside = ".".join(str(step) for step in path[:-1] if isinstance(step, str))
    own = f"{inside}.{name}"  # of another `type`
    places = [place for place in places if inside and place.startswith(f"{inside}.") and place != own] or places
    if len(places) == 1:
        return SpecProblem(pointer, "unknown field", found, f"{places[0]!r}, its place in a job spec")
    return SpecProblem(pointer, "unknown field", found, one_of(written, allowed))


@cache
def field_places() -> tuple[str, ...]:
    """Every field of a job spec by its path, such as "training.adapter.r" and "target.placements[].region"."""
    return tuple(dict.fromkeys(_places(schema(), "")))


def _places(node: dict[str, Any], path: str) -> Iterator[str]:
    for branch in _resolve(node, None):  # whatever its `type` is
        for name, field in branch.get("properties", {}).items():
            place = f"{path}.{name}" if path else name
            yield place
            yield from _places(field, place)
            for listed in _resolve(field, None):
                if "items" in listed:
                    yield from _places(listed["items"], f"{place}[]")


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
