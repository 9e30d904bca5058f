"""The three patch formats: JSON patch (RFC 6902), JSON merge patch (RFC 7386) and Kubernetes' strategic merge."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import jsonpatch

from .refusals import Refusal, bad_request
from .schema import merge_key

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"  # applying.py
ORDER, REMOVE, RETAIN, DIRECTIVE = "$setElementOrder/", "$deleteFromPrimitiveList/", "$retainKeys", "$patch"


def apply_patch(content_type: str, current: dict[str, Any], patch: Any, schema: str) -> dict[str, Any]:
    """A patched copy. Refuses a malformed patch with 400, an unknown format with 415, a failing patch with 422."""
    if content_type == JSON_PATCH:
        return _expect_object(json_patch(current, patch))
    if content_type not in (MERGE_PATCH, STRATEGIC_PATCH) or (content_type == STRATEGIC_PATCH and not schema):
        supported = [JSON_PATCH, MERGE_PATCH, APPLY_PATCH] + ([STRATEGIC_PATCH] if schema else [])
        raise Refusal(
            415, f"the body of the request was in an unknown format - accepted media types include: {supported}"
        )
    if not isinstance(patch, dict):
        raise bad_request(f"a merge patch is a JSON object, not {type(patch).__name__}")
    if content_type == MERGE_PATCH:
        return _expect_object(merge_patch(current, patch))
    return strategic_patch(current, patch, schema)


def merge_patch(current: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(current) if isinstance(current, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def json_patch(current: Any, patch: Any) -> Any:
    if not isinstance(patch, list) or not all(isinstance(operation, dict) for operation in patch):
        raise bad_request("a JSON patch is a list of operations")
    document = copy.deepcopy(current)
    for operation in patch:
        shown = json.dumps(operation)
        try:
            document = jsonpatch.apply_patch(document, [copy.deepcopy(operation)], in_place=True)
        except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as error:
            raise Refusal(422, f"the server rejected our request: {shown} does not apply: {error}") from error
    return document


def strategic_patch(current: dict[str, Any], patch: dict[str, Any], schema: str) -> dict[str, Any]:
    return _merge_object(current, patch, schema, ())


def _merge_object(current: Any, patch: Mapping[str, Any], schema: str, path: tuple[str, ...]) -> dict[str, Any]:
    directive = patch.get(DIRECTIVE)
    if directive == "replace":
        return {key: value for key, value in patch.items() if key != DIRECTIVE and value is not None}
    if directive not in (None, "merge", "delete"):
        raise bad_request(f"unknown patch directive {directive!r} at {'.'.join(path)!r}")
    if directive == "delete":
        return {}
    result = dict(current) if isinstance(current, dict) else {}
    if isinstance(retained := patch.get(RETAIN), list):
        result = {key: value for key, value in result.items() if key in retained}
    for key, value in patch.items():
        if key.startswith((ORDER, REMOVE)) or key in (RETAIN, DIRECTIVE):
            continue
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge_value(result.get(key), value, schema, (*path, key))
    for key, value in patch.items():
        _list_directive(result, key, value, schema, path)
    return result


def _merge_value(current: Any, value: Any, schema: str, path: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return _merge_object(current, value, schema, path)
    if not isinstance(value, list) or (key := merge_key(schema, path)) is None:
        return value
    present = current if isinstance(current, list) else []
    if not key:
        return present + [element for element in value if element not in present]
    return _merge_list(present, value, key, schema, path)


def _merge_list(current: list[Any], patch: list[Any], key: str, schema: str, path: tuple[str, ...]) -> list[Any]:
    if any(isinstance(element, dict) and element.get(DIRECTIVE) == "replace" for element in patch):
        return [element for element in patch if not (isinstance(element, dict) and element.get(DIRECTIVE) == "replace")]
    result = list(current)
    for element in patch:
        if not isinstance(element, dict) or key not in element:
            raise bad_request(f"map: {element!r} does not contain declared merge key: {key}")
        at = next((i for i, old in enumerate(result) if isinstance(old, dict) and old.get(key) == element[key]), None)
        if element.get(DIRECTIVE) == "delete":
            result = [old for old in result if not (isinstance(old, dict) and old.get(key) == element[key])]
        elif at is None:
            result.append(_merge_object({}, element, schema, path))
        else:
            result[at] = _merge_object(result[at], element, schema, path)
    return result


def _list_directive(result: dict[str, Any], key: str, value: Any, schema: str, path: tuple[str, ...]) -> None:
    if key.startswith(REMOVE):
        name = key.removeprefix(REMOVE)
        if isinstance(result.get(name), list) and isinstance(value, list):
            result[name] = [element for element in result[name] if element not in value]
    elif key.startswith(ORDER):
        name = key.removeprefix(ORDER)
        if isinstance(result.get(name), list) and isinstance(value, list):
            result[name] = _ordered(result[name], value, merge_key(schema, (*path, name)) or "")


def _ordered(items: list[Any], order: list[Any], key: str) -> list[Any]:
    """Sort by `order`; elements missing from it (added by another writer) come last."""

    def identity(element: Any) -> Any:
        return json.dumps(element.get(key) if key and isinstance(element, dict) else element, sort_keys=True)

    ranks = {identity(element): rank for rank, element in reversed(list(enumerate(order)))}
    return sorted(items, key=lambda element: ranks.get(identity(element), len(ranks) + 1))


def _expect_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(422, "the patched object is not a JSON object")
    return value
