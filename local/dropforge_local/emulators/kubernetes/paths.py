"""Parses the API's paths and bodies: the target object of a request, and its content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import yaml

from . import protobuf
from .kinds import BY_PATH, NAMESPACE, Kind
from .objects import POLICIES, DeleteOptions
from .refusals import Refusal, bad_request, not_emulated

NOT_EMULATED = {("pods", name) for name in ("attach", "binding", "ephemeralcontainers", "eviction", "resize")}
LARGEST_BODY = 3 * 2**20  # the API server's limit


@dataclass(frozen=True)
class Target:
    """The target of a path: a collection if `name` is empty. `rest` is the path after a proxy subresource."""

    kind: Kind
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    rest: str = ""

    @property
    def resource(self) -> str:
        """The resource as a Role names it, with its group: `batch/jobs`, `pods/log`."""
        return "/".join(part for part in (self.kind.group, self.kind.plural, self.subresource) if part)


def parse_path(path: str) -> Target:
    """The target of a path. Refuses with 404 if the server has no such resource."""
    steps = path.split("/")[1:]
    if steps[:1] == ["api"] and len(steps) >= 3:
        group, version, rest = "", steps[1], steps[2:]
    elif steps[:1] == ["apis"] and len(steps) >= 4:
        group, version, rest = steps[1], steps[2], steps[3:]
    else:
        raise _unknown()
    namespace = ""
    if rest[0] == "namespaces" and len(rest) >= 3 and rest[2] not in NAMESPACE.subresources:
        namespace, rest = unquote(rest[1]), rest[2:]
    kind = BY_PATH.get((group, version, rest[0]))
    if kind is None or (namespace and not kind.namespaced):
        raise _unknown()
    name, subresource = ([unquote(step) for step in rest[1:3]] + ["", ""])[:2]
    if (kind.plural, subresource) in NOT_EMULATED:
        raise not_emulated(f"{kind.plural}/{subresource}")
    if subresource and subresource not in kind.subresources:
        raise _unknown()
    if kind.namespaced and name and not namespace:
        raise _unknown()
    return Target(kind, namespace, name, subresource, "/".join(rest[3:]))


def parse_body(data: bytes, content_type: str) -> Any:
    """A body in JSON (without duplicate keys), in YAML, or a small object in protobuf. Refuses other types with 415."""
    if content_type == protobuf.CONTENT_TYPE:
        return protobuf.decode(data)
    try:
        if content_type in ("application/yaml", "application/apply-patch+yaml"):
            return yaml.safe_load(data)
        if content_type.endswith("json") or content_type in ("", "*/*"):
            return json.loads(data, object_pairs_hook=_without_duplicates) if data else {}
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise bad_request(f"the object provided is unrecognized: {error}") from error
    raise Refusal(
        415, "the body of the request was in an unknown format - accepted media types include: application/json, "
        f"application/yaml; it was {content_type!r}"
    )  # fmt: skip


def parse_delete(body: Any, query: Mapping[str, str]) -> DeleteOptions:
    """Options of a DELETE, from its body or its query."""
    body = body or {}
    if not isinstance(body, dict) or body.get("kind", "DeleteOptions") != "DeleteOptions":
        raise bad_request("the body of a DELETE is a DeleteOptions object")
    preconditions = body.get("preconditions") or {}
    propagation = body.get("propagationPolicy") or query.get("propagationPolicy", "")
    if "orphanDependents" in body or "orphanDependents" in query:
        orphan = str(body.get("orphanDependents", query.get("orphanDependents"))).lower() == "true"
        propagation = propagation or ("Orphan" if orphan else "Background")
    if propagation not in ("", *POLICIES):
        raise Refusal(422, f'DeleteOptions.meta.k8s.io "" is invalid: propagationPolicy: "{propagation}"')
    grace = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    try:
        seconds = None if grace is None else int(grace)
    except (ValueError, TypeError) as error:
        raise bad_request(f"gracePeriodSeconds is {grace!r}; expected a number") from error
    return DeleteOptions(
        propagation, seconds, preconditions.get("uid") or "", preconditions.get("resourceVersion") or ""
    )


def is_dry_run(query: Mapping[str, str], body: Any = None) -> bool:
    given = query.get("dryRun") or ",".join((body.get("dryRun") or []) if isinstance(body, dict) else [])
    if given not in ("", "All"):
        raise Refusal(422, f'dryRun: Unsupported value: "{given}": supported values: "All"')
    return given == "All"


def flag(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "").lower()
    if value not in ("", "0", "1", "true", "false"):
        raise bad_request(f"{name} is {value!r}; expected true or false")
    return value in ("1", "true")


def number(query: Mapping[str, str], name: str) -> int | None:
    """A number of the query; None if it is missing."""
    if not (text := query.get(name, "")):
        return None
    if not text.isdigit():
        raise bad_request(f'{name}: Invalid value: "{text}": must be a number, 0 or more')
    return int(text)


def _unknown() -> Refusal:
    return Refusal(404, "the server could not find the requested resource")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'strict decoding error: duplicate field "{twice}"')
    return result
