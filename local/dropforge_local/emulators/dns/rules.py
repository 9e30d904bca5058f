"""The changes that Cloud DNS refuses: https://cloud.google.com/dns/docs/reference/rest/v1/changes."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any

from dropforge_local.base.errors import ApiError

Json = dict[str, Any]
Key = tuple[str, str]  # the name of a record set, with the dot at its end, and its type
# https://github.com/googleapis/google-api-python-client, documents/dns.v1.json: Change and ResourceRecordSet
CHANGE_FIELDS = frozenset(("additions", "deletions", "id", "isServing", "kind", "startTime", "status"))
RECORD_FIELDS = frozenset(("kind", "name", "routingPolicy", "rrdatas", "signatureRrdatas", "ttl", "type"))
EMULATED = ("name", "type", "ttl", "rrdatas")
NAME = re.compile(r"(?=.{1,254}$)(?:[a-z0-9_](?:[-a-z0-9_]{0,61}[a-z0-9_])?\.)+")
LONGEST_TTL = 2**31 - 1


class Lost(Exception):
    """A change whose record sets are not those that exist: a status, its reason, and a message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.answer: Json = {
            "error": {
                "code": status,
                "message": message,
                "errors": [{"message": message, "domain": "global", "reason": reason}],
            }
        }
        self.status = status


def read_change(body: Json, domain: str) -> tuple[list[Json], list[Json]]:
    """The deletions and the additions of a change. Raises ApiError for what Cloud DNS refuses."""
    _check_fields("entity.change", body, CHANGE_FIELDS)
    parts = []
    for part in ("deletions", "additions"):
        found = body.get(part, [])
        if not isinstance(found, list):
            raise _invalid(f"entity.change.{part}", found)
        parts.append([_record(f"entity.change.{part}[{index}]", each, domain) for index, each in enumerate(found)])
    if not any(parts):
        raise ApiError("INVALID_ARGUMENT", "The 'entity.change' is empty: it has neither additions nor deletions")
    return parts[0], parts[1]


def applied(records: Mapping[Key, Json], deletions: list[Json], additions: list[Json]) -> dict[Key, Json]:
    """The record sets after a change, which is made as a whole or not at all. Raises Lost."""
    changed = dict(records)
    for index, record in enumerate(deletions):
        where, key = f"entity.change.deletions[{index}]", key_of(record)
        if (known := changed.pop(key, None)) is None:
            message = f"The '{where}' resource named '{key[0]} ({key[1]})' does not exist."
            raise Lost(404, "notFound", message)
        if (known["ttl"], sorted(known["rrdatas"])) != (record["ttl"], sorted(record["rrdatas"])):
            raise Lost(412, "conditionNotMet", f"Precondition not met for '{where}'")
    for index, record in enumerate(additions):
        key = key_of(record)
        if key in changed:
            message = f"The resource 'entity.change.additions[{index}]' named '{key[0]} ({key[1]})' already exists"
            raise Lost(409, "alreadyExists", message)
        changed[key] = record
    return changed


def key_of(record: Json) -> Key:
    return record["name"], record["type"]


def read_filter(name: str, kind: str) -> tuple[str, str]:
    """The filter of a list. Raises ApiError: a type needs a name."""
    if kind and not name:
        raise ApiError("INVALID_ARGUMENT", "Invalid value for 'parameters.type': it needs 'parameters.name'")
    return name, kind


def _record(where: str, record: Any, domain: str) -> Json:
    if not isinstance(record, dict):
        raise _invalid(where, record)
    _check_fields(where, record, RECORD_FIELDS)
    name, kind, ttl, data = (record.get(field) for field in EMULATED)
    if not isinstance(name, str) or not NAME.fullmatch(name) or not f".{name}".endswith(f".{domain}."):
        raise _invalid(f"{where}.name", name)
    if kind != "A" or record.keys() - {*EMULATED, "kind"}:
        raise ApiError("UNIMPLEMENTED", f"the local stack's zone has plain A records only, not {record!r}")
    if not isinstance(ttl, int) or isinstance(ttl, bool) or not 0 <= ttl <= LONGEST_TTL:
        raise _invalid(f"{where}.ttl", ttl)
    if not isinstance(data, list) or not data or len(set(map(str, data))) < len(data):
        raise _invalid(f"{where}.rrdatas", data)
    for index, address in enumerate(data):
        try:
            ipaddress.IPv4Address(address)
        except ValueError:
            raise _invalid(f"{where}.rrdatas[{index}]", address) from None
    return {field: record[field] for field in EMULATED}


def _check_fields(where: str, value: Json, known: frozenset[str]) -> None:
    if unknown := sorted(value.keys() - known):
        message = f"Invalid JSON payload received. Unknown name {unknown[0]!r} at '{where}': Cannot find field."
        raise ApiError("INVALID_ARGUMENT", message)


def _invalid(where: str, value: Any) -> ApiError:
    return ApiError("INVALID_ARGUMENT", f"Invalid value for '{where}': '{value}'")
