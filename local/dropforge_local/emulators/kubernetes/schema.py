"""Reads the tables of types.py, checks manifests strictly against them, and renders them as OpenAPI."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any

from .quantities import parse_quantity
from .refusals import Cause, bad_request, not_emulated, required, unsupported
from .types import NOT_EMULATED, TYPES

SCALARS = {"str", "int", "bool", "quantity", "port", "time", "any"}
MAPS = {"map": "str", "bytes": "base64", "quantities": "quantity"}
LARGEST_INT = 2**63


@dataclass(frozen=True)
class Type:
    """`form` is a scalar's name, "enum", "list", "map" or "object"; `name` is an object's type."""

    form: str
    name: str = ""
    values: tuple[str, ...] = ()
    item: Type | None = None
    merge_key: str | None = None


@dataclass(frozen=True)
class Field:
    type: Type
    required: bool


@dataclass
class Findings:
    """Unknown fields and problems of an object that could be parsed."""

    unknown: list[str] = field(default_factory=list)
    dropped: Mapping[str, frozenset[str]] = field(default_factory=dict)  # known fields by type, silently left out
    causes: list[Cause] = field(default_factory=list)


def check(
    type_name: str, value: Mapping[str, Any], dropped: Mapping[str, frozenset[str]] = MappingProxyType({})
) -> tuple[dict[str, Any], Findings]:
    """(copy without unknown and `dropped` fields and nulls, problems). Refuses wrong JSON types with 400, and fields
    that only the real API supports with 501."""
    findings = Findings(dropped=dropped)
    return _object(type_name, value, "", findings), findings


def merge_key(type_name: str, path: tuple[str, ...]) -> str | None:
    """The key by which a strategic merge patch merges the list at `path`; "" for a set, None for a list that it
    replaces. `path` has no list indices."""
    list_type = type_at(type_name, path)
    return list_type.merge_key if list_type is not None and list_type.form == "list" else None


def type_at(type_name: str, path: tuple[str, ...]) -> Type | None:
    current: Type | None = Type("object", type_name)
    for step in path:
        while current is not None and current.form == "list":
            current = current.item
        if current is None or current.form not in ("object", "map"):
            return None
        if current.form == "map":
            current = current.item
            continue
        known = FIELDS[current.name].get(step)
        current = known.type if known else STATUS_LISTS.get(step)
    return current


def openapi(type_name: str) -> dict[str, Any]:
    """A type as an OpenAPI v3 schema."""
    properties = {name: _openapi_type(known.type) for name, known in FIELDS[type_name].items()}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    needed = [name for name, known in FIELDS[type_name].items() if known.required]
    return {**schema, "required": needed} if needed else schema


def _read_fields(text: str) -> dict[str, Field]:
    fields = {}
    for word in text.split():
        name, _, type_text = word.partition(":")
        fields[name] = Field(_read_type(type_text.removesuffix("!")), type_text.endswith("!"))
    return fields


def _read_type(text: str) -> Type:
    if match := re.fullmatch(r"\[(\w+)(?:(/)(\w*))?\]", text):
        return Type("list", item=_read_type(match[1]), merge_key=match[3] if match[2] else None)
    if match := re.fullmatch(r"\{(\w+)\}", text):
        return Type("map", item=_read_type(match[1]))
    if text in MAPS:
        return Type("map", item=Type(MAPS[text]))
    if "|" in text:
        return Type("enum", values=tuple(text.split("|")))
    return Type(text) if text in SCALARS else Type("object", text)


FIELDS = {name: _read_fields(text) for name, text in TYPES.items()}
UNSUPPORTED = {name: set(text.split()) for name, text in NOT_EMULATED.items()}
# Statuses are stored unchecked; patches merge these lists in them.
STATUS_LISTS = {"conditions": Type("list", item=Type("any"), merge_key="type")}


def _object(type_name: str, value: object, path: str, findings: Findings) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _mismatch(path, value, type_name)
    known, clean = FIELDS[type_name], {}
    for name, given in value.items():
        at = f"{path}.{name}" if path else name
        if given is None or name in findings.dropped.get(type_name, ()):
            continue
        if name in known:
            clean[name] = _value(known[name].type, given, at, findings)
        elif name in UNSUPPORTED.get(type_name, ()):
            raise not_emulated(f"{at} ({type_name}.{name})")
        else:
            findings.unknown.append(at)
    for name, definition in known.items():
        # As Go's zero values, an empty string or list counts as missing.
        if definition.required and clean.get(name) in (None, "", []):
            findings.causes.append(required(f"{path}.{name}" if path else name))
    return clean


def _value(expected: Type, value: Any, path: str, findings: Findings) -> Any:
    if expected.form == "object":
        return _object(expected.name, value, path, findings)
    if expected.form == "list":
        return list(_items(expected, value, path, findings))
    if expected.form == "map":
        if not isinstance(value, Mapping):
            raise _mismatch(path, value, "map")
        assert expected.item is not None
        # A null in a map of strings becomes the zero value.
        return {
            key: _value(expected.item, "" if entry is None else entry, f"{path}[{key}]", findings)
            for key, entry in value.items()
        }
    if expected.form == "enum":
        if not isinstance(value, str):
            raise _mismatch(path, value, "string")
        if value not in expected.values:
            findings.causes.append(unsupported(path, value, expected.values))
        return value
    return _scalar(expected.form, value, path)


def _items(expected: Type, value: Any, path: str, findings: Findings) -> Iterator[Any]:
    assert expected.item is not None
    if not isinstance(value, list):
        raise _mismatch(path, value, "array")
    for index, element in enumerate(value):
        at = f"{path}[{index}]"
        if element is None and expected.item.form != "object":
            raise _mismatch(at, element, expected.item.form)
        yield _value(expected.item, {} if element is None else element, at, findings)


def _scalar(form: str, value: Any, path: str) -> Any:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, float) and value.is_integer() and form in ("int", "port"):
        value, is_int = int(value), True
    if is_int and form in ("int", "port") and not -LARGEST_INT <= value < LARGEST_INT:
        raise _mismatch(path, value, "int64")
    accepted = {
        "str": isinstance(value, str),
        "base64": isinstance(value, str),
        "time": isinstance(value, str),
        "int": is_int,
        "bool": isinstance(value, bool),
        "port": is_int or isinstance(value, str),
        "quantity": isinstance(value, str | int | float) and not isinstance(value, bool),
        "any": True,
    }
    if not accepted[form]:
        raise _mismatch(path, value, {"str": "string", "base64": "string", "port": "int or string"}.get(form, form))
    return _parsed(form, value, path)


def _parsed(form: str, value: Any, path: str) -> Any:
    try:
        if form == "quantity":
            parse_quantity(value)
            return str(value)
        if form == "base64":
            base64.b64decode(value, validate=True)
        if form == "time":
            datetime.fromisoformat(value)
    except (ValueError, binascii.Error) as error:
        raise bad_request(f"{path}: cannot be handled: {error}") from error
    return value


def _mismatch(path: str, value: object, expected: str) -> Exception:
    given = "null" if value is None else type(value).__name__
    return bad_request(f"json: cannot unmarshal {given} into field {path or '.'} of type {expected}")


def _openapi_type(shape: Type) -> dict[str, Any]:
    if shape.form == "list":
        assert shape.item is not None
        schema: dict[str, Any] = {"type": "array", "items": _openapi_type(shape.item)}
        if shape.merge_key is not None:
            schema["x-kubernetes-patch-strategy"] = "merge"
        if shape.merge_key:
            schema["x-kubernetes-patch-merge-key"] = shape.merge_key
        return schema
    if shape.form == "map":
        assert shape.item is not None
        return {"type": "object", "additionalProperties": _openapi_type(shape.item)}
    if shape.form == "object":
        return {"allOf": [{"$ref": f"#/components/schemas/{shape.name}"}], "default": {}}
    if shape.form == "enum":
        return {"type": "string", "enum": list(shape.values)}
    simple: dict[str, dict[str, Any]] = {
        "int": {"type": "integer", "format": "int64"},
        "bool": {"type": "boolean"},
        "time": {"type": "string", "format": "date-time"},
        "base64": {"type": "string", "format": "byte"},
        "port": {"format": "int-or-string", "oneOf": [{"type": "integer"}, {"type": "string"}]},
        "quantity": {"oneOf": [{"type": "string"}, {"type": "number"}]},
        "any": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    }
    return simple.get(shape.form, {"type": "string"})
