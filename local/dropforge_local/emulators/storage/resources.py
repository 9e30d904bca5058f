"""JSON resources both ways: rendering buckets and objects, and reading the fields that callers may set."""

from __future__ import annotations

import json
import re
import sqlite3
from typing import Any
from urllib.parse import quote

from ..kit.fields import read_selection
from .errors import invalid, not_emulated
from .listing import Item, Shape
from .models import Attributes, Bucket, StoredObject
from .preconditions import etag_of
from .retention import HOLDS, RELEASED, check_policy

# The host of links in events; a reply links to the host of its request.
PUBLIC_URL = "https://www.googleapis.com"
MAX_METADATA_BYTES = 8 * 1024
MAX_LABELS = 64

_OBJECT_FIELDS: dict[str, type] = {
    **dict.fromkeys(("contentType", "contentEncoding", "contentDisposition", "contentLanguage"), str),
    **dict.fromkeys(("cacheControl", "customTime", "storageClass"), str),
    **dict.fromkeys(HOLDS, bool),
    "metadata": dict,
}
_OBJECT_FIELDS_NOT_EMULATED = ("acl", "contexts", "kmsKeyName", "retention")
_BUCKET_FIELDS: dict[str, type] = {
    **dict.fromkeys(("location", "storageClass"), str),
    **dict.fromkeys(("labels", "lifecycle", "versioning", "website", "logging", "iamConfiguration"), dict),
    "cors": list,
    "defaultEventBasedHold": bool,
    "retentionPolicy": dict,
}
_BUCKET_FIELDS_NOT_EMULATED = (
    "acl", "autoclass", "billing", "customPlacementConfig", "defaultObjectAcl", "encryption",
    "hierarchicalNamespace", "ipFilter", "objectRetention", "softDeletePolicy",
)  # fmt: skip
_JSON_KIND: dict[type, str] = {bool: "boolean", str: "string", dict: "object", list: "array"}
_STORAGE_CLASSES = ("STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE", "MULTI_REGIONAL", "REGIONAL")
_LIFECYCLE_ACTIONS = ("Delete", "SetStorageClass", "AbortIncompleteMultipartUpload")
_MULTI_REGIONS = ("US", "EU", "ASIA")
_LABEL_KEY = re.compile(r"[^\W\d_][\w-]{,62}")
_LABEL_VALUE = re.compile(r"[\w-]{,63}")
# Fields of an object, and the column that each needs; a listing of only these is made without the other columns.
_COLUMNS = {
    "name": "name",
    "generation": "generation",
    "metageneration": "metageneration",
    "size": "size",
    "timeCreated": "created",
    "metadata": "attributes",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def object_json(stored: StoredObject, base_url: str) -> dict[str, Any]:
    """The object resource. 64-bit numbers are decimal strings, absent fields are left out."""
    content = stored.content
    path = f"storage/v1/b/{stored.bucket}/o/{quote(stored.name, safe='')}"
    resource: dict[str, Any] = {
        "kind": "storage#object",
        "id": f"{stored.bucket}/{stored.name}/{stored.generation}",
        "selfLink": f"{base_url}/{path}",
        "mediaLink": f"{base_url}/download/{path}?generation={stored.generation}&alt=media",
        "name": stored.name,
        "bucket": stored.bucket,
        "generation": str(stored.generation),
        "metageneration": str(stored.metageneration),
        "storageClass": "STANDARD",
        "size": str(content.size),
        "crc32c": content.crc32c,
        "etag": stored.etag,
        "timeCreated": stored.created,
        "updated": stored.updated,
        "timeStorageClassUpdated": stored.created,
        "timeFinalized": stored.created,
        **{name: value for name, value in stored.attributes.items() if name != RELEASED},
    }
    optional = {"md5Hash": content.md5, "componentCount": content.component_count, "timeDeleted": stored.deleted}
    resource.update({name: value for name, value in optional.items() if value is not None})
    return resource


def shape_of(fields: str, base_url: str) -> Shape:
    """The columns that a listing reads and the JSON of its objects, for a value of the query parameter `fields`."""
    try:
        wanted = set(read_selection(fields)["items"])
    except (ValueError, KeyError):
        wanted = set()
    if not wanted or not wanted <= _COLUMNS.keys():
        return Shape("*", lambda row: object_json(StoredObject.from_row(row), base_url))
    columns = {"name", "generation", *(_COLUMNS[field] for field in wanted)}
    return Shape(", ".join(sorted(columns)), lambda row: _some_fields(row, wanted))


def _some_fields(row: sqlite3.Row, wanted: set[str]) -> Item:
    """The wanted fields of an object, all of them in _COLUMNS."""
    item: Item = {}
    for name in wanted:
        value = row[_COLUMNS[name]]
        if name == "metadata":
            value = json.loads(value).get("metadata")
        if value is not None:
            item[name] = str(value) if isinstance(value, int) else value
    return item


def bucket_json(bucket: Bucket, base_url: str, project_number: str) -> dict[str, Any]:
    """The bucket resource."""
    location = bucket.attributes["location"]
    access = {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "inherited"}
    attributes = {name: value for name, value in bucket.attributes.items() if name != "iamConfiguration"}
    return {
        "kind": "storage#bucket",
        "id": bucket.name,
        "selfLink": f"{base_url}/storage/v1/b/{bucket.name}",
        "projectNumber": project_number,
        "name": bucket.name,
        "locationType": "multi-region" if location in _MULTI_REGIONS else "region",
        "storageClass": "STANDARD",
        "metageneration": str(bucket.metageneration),
        "etag": etag_of(None, bucket.metageneration),
        "timeCreated": bucket.created,
        "updated": bucket.updated,
        "softDeletePolicy": {"retentionDurationSeconds": "0"},
        "iamConfiguration": access | bucket.attributes.get("iamConfiguration", {}),
        **attributes,
    }


def object_attributes(body: dict[str, Any], old: Attributes | None = None) -> Attributes:
    """Check the settable fields of an object resource and merge them over `old`; null removes a field.

    Output-only and unknown fields are ignored, as the real API ignores them.
    """
    _refuse_not_emulated(body, _OBJECT_FIELDS_NOT_EMULATED)
    attributes = _merge(body, old or {}, _OBJECT_FIELDS)
    for name, value in attributes.items():
        if isinstance(value, str) and _CONTROL.search(value):
            raise invalid(f"Invalid value for {name}: {value!r}; expected no control characters")
    _check_storage_class(attributes)
    _check_metadata(attributes.get("metadata", {}))
    return attributes


def bucket_attributes(body: dict[str, Any], old: Attributes | None = None) -> Attributes:
    """Check the settable fields of a bucket resource and merge them over `old`; null removes a field."""
    _refuse_not_emulated(body, _BUCKET_FIELDS_NOT_EMULATED)
    attributes = _merge(body, old or {}, _BUCKET_FIELDS)
    attributes["location"] = _location(attributes, old)
    _check_storage_class(attributes)
    _check_labels(attributes.get("labels", {}))
    _check_lifecycle(attributes.get("lifecycle", {}))
    check_policy(attributes, old or {})
    access = attributes.get("iamConfiguration", {}).get("uniformBucketLevelAccess", {})
    if isinstance(access, dict) and access.get("enabled") is False:
        raise not_emulated("iamConfiguration.uniformBucketLevelAccess.enabled = false (per-object ACLs)")
    return attributes


def _refuse_not_emulated(body: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if not _is_default(body.get(name)):
            raise not_emulated(f"the field {name!r}")


def _is_default(value: object) -> bool:
    """Whether a field has a default value: null, false, zero, or empty at every depth."""
    if isinstance(value, dict):
        return all(_is_default(inner) for inner in value.values())
    return not value or value == "0"


def _merge(body: dict[str, Any], old: Attributes, fields: dict[str, type]) -> Attributes:
    merged = dict(old)
    for name, kind in fields.items():
        if name not in body:
            continue
        value = body[name]
        if value is None:
            merged.pop(name, None)
        elif not isinstance(value, kind):
            raise invalid(f"Invalid value for {name}: {value!r}; expected a JSON {_JSON_KIND[kind]}")
        elif name in ("metadata", "labels"):
            entries: dict[str, Any] = old.get(name, {}) | value
            merged[name] = {key: entry for key, entry in entries.items() if entry is not None}
        else:
            merged[name] = value
    return merged


def _location(attributes: Attributes, old: Attributes | None) -> str:
    location = str(attributes.get("location", "US")).upper()
    if not re.fullmatch(r"[A-Z0-9-]{2,40}", location):
        raise invalid(f"Invalid value for location: {location!r}; expected a region such as US-CENTRAL1")
    if old and location != old["location"]:
        raise invalid(f"The location of a bucket cannot be changed: it is {old['location']!r}, not {location!r}")
    return location


def _check_storage_class(attributes: Attributes) -> None:
    storage_class = attributes.get("storageClass", "STANDARD")
    if storage_class not in _STORAGE_CLASSES:
        raise invalid(
            f"Invalid value for storageClass: {storage_class!r}; expected one of {', '.join(_STORAGE_CLASSES)}"
        )


def _check_metadata(metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise invalid(f"Invalid value for metadata.{key}: {value!r}; expected a string")
    size = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
    if size > MAX_METADATA_BYTES:
        raise invalid(f"The custom metadata is {size} bytes long; expected at most {MAX_METADATA_BYTES}")


def _check_labels(labels: dict[str, Any]) -> None:
    if len(labels) > MAX_LABELS:
        raise invalid(f"There are {len(labels)} labels; expected at most {MAX_LABELS}")
    for key, value in labels.items():
        if key != key.lower() or not _LABEL_KEY.fullmatch(key):
            raise invalid(
                f"Invalid label key: {key!r}; expected a lower-case letter, then letters, digits, '_' and '-'"
            )
        if not isinstance(value, str) or value != value.lower() or not _LABEL_VALUE.fullmatch(value):
            raise invalid(f"Invalid value of label {key!r}: {value!r}; expected lower-case letters, digits, '_', '-'")


def _check_lifecycle(lifecycle: dict[str, Any]) -> None:
    """Check the rules, which the local stack returns but never runs (no test waits for days)."""
    rules = lifecycle.get("rule", [])
    if not isinstance(rules, list):
        raise invalid(f"Invalid value for lifecycle.rule: {rules!r}; expected a list of rules")
    for rule in rules:
        action = rule.get("action") if isinstance(rule, dict) else None
        condition = rule.get("condition") if isinstance(rule, dict) else None
        if not isinstance(action, dict) or action.get("type") not in _LIFECYCLE_ACTIONS:
            raise invalid(f"Invalid lifecycle rule {rule!r}; expected action.type to be one of {_LIFECYCLE_ACTIONS}")
        if not isinstance(condition, dict) or not condition:
            raise invalid(f"Invalid lifecycle rule {rule!r}; expected at least one condition")
