"""The limits of the Telemetry API for spans: https://cloud.google.com/stackdriver/quotas, and trace.proto.

Google documents no texts of its refusals; these are the emulator's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.json_format import ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dropforge_local.base.errors import ApiError

PROTOBUF = "application/x-protobuf"
MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_NAME_BYTES, MAX_ATTRIBUTES = 512, 64 * 1024, 1024, 1024
PROJECT = "gcp.project_id"


def read(headers: Mapping[str, str], body: bytes, project: str) -> Any:
    """The request of a call. Raises ApiError for a request that stores no span."""
    if (kind := headers.get("Content-Type", "")) != PROTOBUF:
        raise ApiError("INVALID_ARGUMENT", f"the Content-Type is {kind!r}; this emulator takes {PROTOBUF}")
    if headers.get("x-goog-user-project") != project:
        raise ApiError("PERMISSION_DENIED", f"the header x-goog-user-project does not name the project {project}")
    request = ExportTraceServiceRequest()
    try:
        request.ParseFromString(body)
    except (DecodeError, ParseError) as error:
        raise ApiError("INVALID_ARGUMENT", f"the body is no ExportTraceServiceRequest: {error}") from error
    for resource_spans in request.resource_spans:
        _check_resource(resource_spans.resource.attributes, project)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                _check_span(span)
    return request


def _check_resource(attributes: Iterable[Any], project: str) -> None:
    _check_attributes(attributes)
    named = [attribute.value.string_value for attribute in attributes if attribute.key == PROJECT]
    if named != [project]:
        raise ApiError("INVALID_ARGUMENT", f"the resource's {PROJECT} is {named}; expected {project}")


def _check_span(span: Any) -> None:
    ids = (span.trace_id, 16), (span.span_id, 8), *([(span.parent_span_id, 8)] if span.parent_span_id else [])
    if not all(len(value) == length and any(value) for value, length in ids):
        raise ApiError("INVALID_ARGUMENT", f"span {span.name!r} has an id that is not valid")
    if not span.name or len(span.name.encode()) > MAX_NAME_BYTES:
        raise ApiError("INVALID_ARGUMENT", f"a span's name has {len(span.name)} characters")
    if not 0 < span.start_time_unix_nano <= span.end_time_unix_nano:
        raise ApiError("INVALID_ARGUMENT", f"span {span.name!r} has not ended, or ended before it began")
    _check_attributes(span.attributes)


def _check_attributes(attributes: Iterable[Any]) -> None:
    keys = [attribute.key for attribute in attributes]
    if len(keys) > MAX_ATTRIBUTES or len(set(keys)) != len(keys):
        raise ApiError("INVALID_ARGUMENT", "too many attributes, or two attributes with the same key")
    for attribute in attributes:
        if not attribute.key or len(attribute.key.encode()) > MAX_KEY_BYTES:
            raise ApiError("INVALID_ARGUMENT", f"an attribute's key has {len(attribute.key)} characters")
        if attribute.value.ByteSize() > MAX_VALUE_BYTES:
            raise ApiError("INVALID_ARGUMENT", f"the value of the attribute {attribute.key} is too long")
