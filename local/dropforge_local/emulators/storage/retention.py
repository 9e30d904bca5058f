"""Holds of objects and the retention policies of buckets, which refuse to delete or replace an object.

https://cloud.google.com/storage/docs/object-holds, https://cloud.google.com/storage/docs/bucket-lock
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from .errors import StorageError, invalid
from .models import Attributes, Bucket, StoredObject, rfc3339

HOLDS = {"eventBasedHold": "Event-Based", "temporaryHold": "Temporary"}
RELEASED = "eventBasedHoldReleased"  # the attribute with the time from which the policy counts; no field of the API
LONGEST_SECONDS = 3_155_760_000  # 100 years


def check_policy(attributes: Attributes, old: Attributes) -> None:
    """Refuse a malformed retention policy, and the removal or the shortening of a locked one."""
    policy, before = attributes.get("retentionPolicy"), old.get("retentionPolicy") or {}
    seconds = _period(policy) if policy else 0
    if policy and not 0 < seconds <= LONGEST_SECONDS:
        raise invalid(f"Invalid retentionPeriod: {policy.get('retentionPeriod')!r}; expected 1 to {LONGEST_SECONDS}")
    if before.get("isLocked") and seconds < _period(before):
        raise StorageError(403, "forbidden", "Cannot remove or reduce the retention period of a locked policy")
    if policy:
        kept = {name: before[name] for name in ("effectiveTime", "isLocked") if name in before}
        attributes["retentionPolicy"] = {"retentionPeriod": str(seconds), **kept}


def take_effect(attributes: Attributes, now: float) -> Attributes:
    """The attributes of a bucket whose new retention policy takes effect now."""
    policy = attributes.get("retentionPolicy")
    if policy and "effectiveTime" not in policy:
        attributes["retentionPolicy"] = {**policy, "effectiveTime": rfc3339(now)}
    return attributes


def locked(attributes: Attributes) -> Attributes:
    """The attributes of a bucket whose policy is locked for ever. Refuses a bucket without a policy."""
    if not attributes.get("retentionPolicy"):
        raise invalid("The bucket has no retention policy to lock")
    return {**attributes, "retentionPolicy": {**attributes["retentionPolicy"], "isLocked": True}}


def of_new_object(bucket: Bucket, attributes: Attributes) -> Attributes:
    """The attributes of a new object, with the bucket's default hold."""
    if bucket.attributes.get("defaultEventBasedHold") and "eventBasedHold" not in attributes:
        return {**attributes, "eventBasedHold": True}
    return attributes


def after_change(new: Attributes, old: Attributes, now: float) -> Attributes:
    """The attributes of a changed object: its retention starts when its event-based hold ends."""
    if old.get("eventBasedHold") and not new.get("eventBasedHold"):
        return {**new, RELEASED: rfc3339(now)}
    return new


def check_removal(bucket: Bucket, stored: StoredObject, now: float) -> None:
    """Refuse to delete or replace an object that a hold or the bucket's retention policy keeps."""
    name = f"{stored.bucket}/{stored.name}"
    for field, kind in HOLDS.items():
        if stored.attributes.get(field):
            raise StorageError(
                403,
                "objectUnderActiveHold",
                f"Object '{name}' is under active {kind} hold and cannot be deleted, overwritten or archived until "
                "hold is removed.",
            )
    policy = bucket.attributes.get("retentionPolicy")
    if not policy:
        return
    start = datetime.fromisoformat(stored.attributes.get(RELEASED) or stored.created).timestamp()
    end = start + _period(policy)
    if now < end:
        raise StorageError(
            403,
            "retentionPolicyNotMet",
            f"Object '{name}' is subject to bucket's retention policy or object retention and cannot be deleted or "
            f"overwritten until {rfc3339(end)}",
        )


def _period(policy: dict[str, Any]) -> int:
    try:
        return int(policy.get("retentionPeriod", 0))
    except (ValueError, TypeError):
        raise invalid(f"Invalid retentionPeriod: {policy.get('retentionPeriod')!r}; expected seconds") from None
