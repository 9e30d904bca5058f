"""JSON bodies to Cloud Run's messages and back, as strict as Google's front end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeVar, cast

from google.cloud import run_v2
from google.cloud.run_v2 import types
from google.protobuf import duration_pb2, json_format, timestamp_pb2

from dropforge_local.base.errors import ApiError

Message = TypeVar("Message", bound=Any)

# "Required." and "Output only." stand in the API's prose alone (a test compares these tables with it).
REQUIRED: dict[str, tuple[str, ...]] = {
    "CloudStorageSource": ("bucket", "object_"),
    "Container": ("image",),
    "EnvVar": ("name",),
    "ExecutionTemplate": ("template",),
    "HTTPHeader": ("name",),
    "Job": ("template",),
    "MultiRegionSettings": ("regions",),
    "NodeSelector": ("accelerator",),
    "SecretKeySelector": ("secret",),
    "SecretVolumeSource": ("secret",),
    "Service": ("template",),
    "VersionToPath": ("path",),
    "Volume": ("name",),
    "VolumeMount": ("name", "mount_path"),
}
_COMMON_OUTPUT = (
    "uid generation create_time update_time delete_time expire_time creator last_modifier observed_generation "
    "terminal_condition conditions reconciling satisfies_pzs"
)
OUTPUT_ONLY: dict[str, tuple[str, ...]] = {
    "Job": tuple(f"{_COMMON_OUTPUT} execution_count latest_created_execution".split()),
    "Service": tuple(
        f"{_COMMON_OUTPUT} urls uri latest_ready_revision latest_created_revision traffic_statuses "
        "threat_detection_enabled".split()
    ),
    "Container": ("build_info",),
    "BuildConfig": ("name",),
}


def parse(body: bytes, message_type: type[Message], at: str, *, partial: bool = False) -> Message:
    """Read a JSON body; unknown names, wrong types and missing required fields (unless partial) are INVALID_ARGUMENT.

    Output-only fields are dropped, as in every read-modify-write.
    """
    try:
        data = json.loads(body or b"{}")
    except ValueError as error:
        raise ApiError("INVALID_ARGUMENT", f"Invalid JSON payload received. {error}") from error
    if not isinstance(data, dict):
        raise ApiError("INVALID_ARGUMENT", f"Invalid JSON payload received. Expected an object, got {data!r}")
    message = message_type()
    try:
        json_format.ParseDict(data, message_type.pb(message), ignore_unknown_fields=False)
    except (json_format.ParseError, TypeError, AttributeError) as error:
        reason = str(error).split(" Available Fields")[0]
        raise ApiError("INVALID_ARGUMENT", f"Invalid JSON payload received. {reason}") from error
    _drop_output_fields(message_type.pb(message))
    if not partial and (missing := next(_missing(message_type.pb(message), at), None)):
        raise ApiError("INVALID_ARGUMENT", f"{missing}: Required field not provided.")
    return cast(Message, message)


def render(message: Any) -> dict[str, Any]:
    """The JSON that the API answers: enum names, no default values."""
    return cast(dict[str, Any], json_format.MessageToDict(type(message).pb(message)))


def pack(message: Any) -> dict[str, Any]:
    """The JSON of a google.protobuf.Any."""
    return {"@type": f"type.googleapis.com/{type(message).pb(message).DESCRIPTOR.full_name}", **render(message)}


def timestamp(when: float) -> timestamp_pb2.Timestamp:
    nanoseconds = round(when * 1e6) * 1000
    return timestamp_pb2.Timestamp(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)


def seconds(duration: Any) -> float:
    """A Duration field as seconds; proto-plus hands it out as a timedelta."""
    return cast(float, duration.total_seconds())


def duration(value: float) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=int(value))


def has(message: Any, field: str) -> bool:
    return field in message


def condition(
    kind: str,
    state: str,
    now: float,
    message: str = "",
    *,
    reason: str = "",
    revision_reason: str = "",
    execution_reason: str = "",
) -> types.Condition:
    """One status condition; `state` is SUCCEEDED, FAILED, RECONCILING or PENDING."""
    made = run_v2.Condition(
        type_=kind,
        state=run_v2.Condition.State[f"CONDITION_{state}"],
        message=message,
        last_transition_time=timestamp(now),
    )
    if reason:
        made.reason = run_v2.Condition.CommonReason[reason]
    if revision_reason:
        made.revision_reason = run_v2.Condition.RevisionReason[revision_reason]
    if execution_reason:
        made.execution_reason = run_v2.Condition.ExecutionReason[execution_reason]
    return made


def set_condition(conditions: Any, new: types.Condition) -> None:
    """Replace the condition of the same type, keeping its time if the state is the same."""
    for index, old in enumerate(conditions):
        if old.type_ == new.type_:
            if old.state == new.state:
                new.last_transition_time = old.last_transition_time
            conditions[index] = new
            return
    conditions.append(new)


def _drop_output_fields(message: Any) -> None:
    for name in OUTPUT_ONLY.get(message.DESCRIPTOR.name, ()):
        message.ClearField(name)
    for _, child in _children(message):
        _drop_output_fields(child)


def _missing(message: Any, at: str) -> Iterator[str]:
    for name in REQUIRED.get(message.DESCRIPTOR.name, ()):
        field = message.DESCRIPTOR.fields_by_name[name]
        given = message.HasField(name) if field.message_type and not field.is_repeated else getattr(message, name)
        if not given:
            yield f"{at}.{name.rstrip('_')}"
    for name, child in _children(message):
        yield from _missing(child, f"{at}.{name}")


def _children(message: Any) -> Iterator[tuple[str, Any]]:
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            yield from ((f"{field.name}[{index}]", child) for index, child in enumerate(value))
        else:
            yield field.name, value
