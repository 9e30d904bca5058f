"""The names, limits and combinations that Pub/Sub refuses, checked before a change is stored.

Limits: https://cloud.google.com/pubsub/quotas#resource_limits and the API reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from dropforge_local.base.errors import ApiError

from ..kit.rpc import Message
from ..kit.times import seconds_of
from .filters import compile_filter
from .schemas import REASON

RESOURCE_ID = r"[A-Za-z][A-Za-z0-9\-_.~+%]{2,254}"
DELETED_TOPIC = "_deleted-topic_"
DAY_SECONDS = 86400
DEFAULT_RETENTION_SECONDS = 7 * DAY_SECONDS
DEFAULT_EXPIRATION_SECONDS = 31 * DAY_SECONDS
RETENTION_SECONDS = (600, 31 * DAY_SECONDS)
ACK_DEADLINE_SECONDS = (10, 600)
DELIVERY_ATTEMPTS = (5, 100)
BACKOFF_SECONDS = (10, 600)  # the defaults of a retry policy
MAX_MESSAGE_BYTES = 10_000_000
MAX_MESSAGES_PER_PUBLISH = 1000
MAX_ATTRIBUTES = 100
MAX_ATTRIBUTE_KEY_BYTES = 256
MAX_ATTRIBUTE_VALUE_BYTES = 1024
MAX_ORDERING_KEY_BYTES = 1024
UNSUPPORTED_TOPIC_FIELDS = (
    "kms_key_name", "ingestion_data_source_settings", "message_transforms", "tags",
)  # fmt: skip
UNSUPPORTED_SUBSCRIPTION_FIELDS = (
    "bigquery_config", "cloud_storage_config", "bigtable_config", "message_transforms", "tags",
)  # fmt: skip


def invalid(message: str) -> ApiError:
    return ApiError("INVALID_ARGUMENT", message)


def check_name(name: str, collection: str) -> None:
    """Refuse a name other than projects/P/`collection`/ID."""
    match = re.fullmatch(rf"projects/([a-z0-9.:\-]+)/{collection}/({RESOURCE_ID})", name)
    if match is None or match[2].startswith("goog"):
        raise invalid(
            f"invalid resource name {name!r}; expected projects/PROJECT/{collection}/ID, "
            "with an ID of 3 to 255 characters that starts with a letter, but not with goog"
        )


def check_project(project: str) -> None:
    if not re.fullmatch(r"projects/[a-z0-9.:\-]+", project):
        raise invalid(f"invalid project {project!r}; expected projects/PROJECT")


def check_topic(topic: Message) -> None:
    check_name(topic.name, "topics")
    _check_labels(topic.labels)
    _refuse_unsupported(topic, UNSUPPORTED_TOPIC_FIELDS)
    if topic.HasField("schema_settings"):
        raise ApiError("UNIMPLEMENTED", f"schema_settings: {REASON}")
    if topic.HasField("message_retention_duration"):
        _check_range("message_retention_duration", seconds_of(topic.message_retention_duration), RETENTION_SECONDS)


def complete_subscription(subscription: Message) -> None:
    """Check a subscription and fill in the defaults that the service would report."""
    check_name(subscription.name, "subscriptions")
    _check_labels(subscription.labels)
    _refuse_unsupported(subscription, UNSUPPORTED_SUBSCRIPTION_FIELDS)
    compile_filter(subscription.filter)
    subscription.ack_deadline_seconds = subscription.ack_deadline_seconds or ACK_DEADLINE_SECONDS[0]
    _check_range("ack_deadline_seconds", subscription.ack_deadline_seconds, ACK_DEADLINE_SECONDS)
    if not subscription.HasField("message_retention_duration"):
        subscription.message_retention_duration.seconds = DEFAULT_RETENTION_SECONDS
    retention = seconds_of(subscription.message_retention_duration)
    _check_range("message_retention_duration", retention, RETENTION_SECONDS)
    _complete_expiration(subscription)
    _complete_dead_letter(subscription)
    _complete_retry(subscription)
    complete_push(subscription)


def complete_push(subscription: Message) -> None:
    """Check the push configuration; without an endpoint, the subscription is a pull subscription."""
    push = subscription.push_config
    if not push.push_endpoint:
        subscription.ClearField("push_config")
        return
    try:
        url = urlsplit(push.push_endpoint)
    except ValueError as error:
        raise invalid(f"invalid push_endpoint {push.push_endpoint!r}: {error}") from error
    # Google requires https; the local stack's functions have http.
    if url.scheme not in ("http", "https") or not url.hostname:
        raise invalid(f"invalid push_endpoint {push.push_endpoint!r}; expected an http:// or https:// URL")
    if subscription.enable_exactly_once_delivery:
        raise invalid("enable_exactly_once_delivery is for pull subscriptions; this subscription has a push_endpoint")
    for name, value in push.attributes.items():
        if name != "x-goog-version" or value not in ("v1", "v1beta2"):
            raise invalid(f"invalid push attribute {name!r}={value!r}; expected x-goog-version v1")
    push.attributes["x-goog-version"] = "v1"


def check_messages(messages: Iterable[Message]) -> None:
    """Refuse a publish request with an invalid message, as a whole."""
    count = total = 0
    for message in messages:
        count += 1
        total += message.ByteSize()
        _check_message(message)
    if not 1 <= count <= MAX_MESSAGES_PER_PUBLISH:
        raise invalid(f"{count} messages in one request; expected 1 to {MAX_MESSAGES_PER_PUBLISH}")
    if total > MAX_MESSAGE_BYTES:
        raise invalid(f"the request's messages are {total} bytes; the limit is {MAX_MESSAGE_BYTES}")


def check_modified_deadline(deadline_seconds: int) -> None:
    if not 0 <= deadline_seconds <= ACK_DEADLINE_SECONDS[1]:
        raise invalid(f"ack deadline {deadline_seconds} s; expected 0 to {ACK_DEADLINE_SECONDS[1]}")


def check_stream_deadline(deadline_seconds: int) -> None:
    _check_range("stream_ack_deadline_seconds", deadline_seconds, ACK_DEADLINE_SECONDS)


def _complete_expiration(subscription: Message) -> None:
    if not subscription.HasField("expiration_policy"):
        subscription.expiration_policy.ttl.seconds = DEFAULT_EXPIRATION_SECONDS
    policy = subscription.expiration_policy
    if policy.HasField("ttl") and seconds_of(policy.ttl) < DAY_SECONDS:
        raise invalid(f"expiration_policy.ttl is {seconds_of(policy.ttl):g} s; expected at least one day")


def _complete_dead_letter(subscription: Message) -> None:
    if not subscription.HasField("dead_letter_policy"):
        return
    policy = subscription.dead_letter_policy
    check_name(policy.dead_letter_topic, "topics")
    policy.max_delivery_attempts = policy.max_delivery_attempts or DELIVERY_ATTEMPTS[0]
    _check_range("dead_letter_policy.max_delivery_attempts", policy.max_delivery_attempts, DELIVERY_ATTEMPTS)


def _complete_retry(subscription: Message) -> None:
    if not subscription.HasField("retry_policy"):
        return
    policy = subscription.retry_policy
    for field, default in zip(("minimum_backoff", "maximum_backoff"), BACKOFF_SECONDS, strict=True):
        if not policy.HasField(field):
            getattr(policy, field).seconds = default
        _check_range(f"retry_policy.{field}", seconds_of(getattr(policy, field)), (0, BACKOFF_SECONDS[1]))
    if seconds_of(policy.minimum_backoff) > seconds_of(policy.maximum_backoff):
        raise invalid("retry_policy.minimum_backoff is greater than maximum_backoff")


def _check_message(message: Message) -> None:
    if not message.data and not message.attributes:
        raise invalid("a message has no data and no attributes; expected data or attributes")
    if len(message.attributes) > MAX_ATTRIBUTES:
        raise invalid(f"a message has {len(message.attributes)} attributes; the limit is {MAX_ATTRIBUTES}")
    for key, value in message.attributes.items():
        if not 1 <= len(key.encode()) <= MAX_ATTRIBUTE_KEY_BYTES or key.startswith("goog"):
            raise invalid(
                f"invalid attribute key {key!r}; expected 1 to {MAX_ATTRIBUTE_KEY_BYTES} bytes, not starting with goog"
            )
        if len(value.encode()) > MAX_ATTRIBUTE_VALUE_BYTES:
            raise invalid(f"attribute {key!r} is longer than {MAX_ATTRIBUTE_VALUE_BYTES} bytes")
    if len(message.ordering_key.encode()) > MAX_ORDERING_KEY_BYTES:
        raise invalid(f"ordering_key is longer than {MAX_ORDERING_KEY_BYTES} bytes")


def _check_labels(labels: dict[str, str]) -> None:
    if len(labels) > 64:
        raise invalid(f"{len(labels)} labels; the limit is 64")
    for key, value in labels.items():
        if not re.fullmatch(r"[^\W\d_][\w-]{0,62}", key) or not re.fullmatch(r"[\w-]{0,63}", value):
            raise invalid(f"invalid label {key!r}={value!r}; expected up to 63 letters, digits, _ and -")
        if key != key.lower() or value != value.lower():
            raise invalid(f"invalid label {key!r}={value!r}; expected lower case")


def _refuse_unsupported(resource: Message, fields: Iterable[str]) -> None:
    present = {field.name for field, _ in resource.ListFields()}
    for field in fields:
        if field in present:
            raise ApiError("UNIMPLEMENTED", f"{field} is not emulated by the local stack")


def _check_range(field: str, value: float, limits: tuple[Any, Any]) -> None:
    if not limits[0] <= value <= limits[1]:
        raise invalid(f"{field} is {value:g}; expected {limits[0]} to {limits[1]}")
