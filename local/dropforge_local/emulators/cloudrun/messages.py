"""Cloud Run's messages: the checks of Google's front end, times, and conditions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from google.cloud import run_v2
from google.cloud.run_v2 import types
from google.protobuf import duration_pb2

from dropforge_local.base.errors import ApiError

from ..kit.operations import Json, pack
from ..kit.times import timestamp
from .store import new_uid

# Only the prose of the API says "Required." and "Output only."; a test compares these tables with the prose.
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


def accept(message_type: Any, message: Any, at: str, *, partial: bool = False) -> Any:
    """A resource of a request, as proto-plus. Raises INVALID_ARGUMENT for a missing required field (unless partial).

    Output-only fields are dropped: clients send them in every read-modify-write.
    """
    _drop_output_fields(message)
    if not partial and (missing := next(_missing(message, at), None)):
        raise ApiError("INVALID_ARGUMENT", f"{missing}: Required field not provided.")
    return message_type.wrap(message)


def packed(resource: Any) -> Json:
    """A proto-plus message as an operation keeps it."""
    return pack(type(resource).pb(resource))


def seconds(duration: Any) -> float:
    """A Duration field as seconds; proto-plus reads it as a timedelta."""
    return cast(float, duration.total_seconds())


def duration(value: float) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=int(value))


def has(message: Any, field: str) -> bool:
    return field in message


def given(message: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    """The fields that a message has."""
    return {field: getattr(message, field) for field in fields if has(message, field)}


def made_from(template: Any, name: str, now: float, first: types.Condition) -> dict[str, Any]:
    """The annotations and output fields of a new execution, task or revision, with its first condition."""
    return {
        "name": name,
        "uid": new_uid(),
        "generation": 1,
        "annotations": template.annotations,
        "create_time": timestamp(now),
        "update_time": timestamp(now),
        "reconciling": True,
        "conditions": [first],
    }


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
    """A status condition; `state` is SUCCEEDED, FAILED, RECONCILING or PENDING."""
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
    """Replace the condition of the same type; keep its time if the state is the same."""
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
