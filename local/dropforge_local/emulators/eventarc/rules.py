"""Triggers, and the triggers that Eventarc refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dropforge_local.base.errors import ApiError

from ..pubsub.push import MESSAGE_PUBLISHED

STORAGE_EVENT = "google.cloud.storage.object.v1."
STORAGE_EVENTS = ("finalized", "deleted", "archived", "metadataUpdated")
# The attribute that a trigger of this event type must filter on.
FILTERS = {MESSAGE_PUBLISHED: "topic"} | {STORAGE_EVENT + event: "bucket" for event in STORAGE_EVENTS}


@dataclass(frozen=True)
class Trigger:
    """Which events go to which URL. `filters` match exactly: {"bucket": name} or {"topic": "projects/P/topics/T"}.

    After `delivery_attempts` an event moves to the dead-letter topic; 0: after Pub/Sub's default number.
    """

    name: str
    event_type: str
    filters: Mapping[str, str] = field(default_factory=dict)
    destination_url: str = ""
    dead_letter_topic: str | None = None
    delivery_attempts: int = 0


def check_trigger(trigger: Trigger) -> None:
    expected = FILTERS.get(trigger.event_type)
    if expected is None:
        raise ApiError(
            "UNIMPLEMENTED", f"event type {trigger.event_type!r} is not emulated; expected one of {list(FILTERS)}"
        )
    if set(trigger.filters) != {expected}:
        raise ApiError(
            "INVALID_ARGUMENT",
            f"trigger {trigger.name!r} filters on {sorted(trigger.filters)}; expected exactly {expected!r} "
            "(Eventarc has no object-name filter for direct storage events)",
        )
