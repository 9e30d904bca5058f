"""Notifications: messages about a bucket's objects to topics of Pub/Sub, in the table storage_notifications.

https://cloud.google.com/storage/docs/pubsub-notifications
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ..kit.routing import Call, Reply, Route
from .buckets import Buckets
from .errors import StorageError, invalid, not_emulated
from .models import ObjectChange
from .preconditions import etag_of
from .wire import parse_json

EVENT_TYPES = {
    "finalized": "OBJECT_FINALIZE",
    "metadataUpdated": "OBJECT_METADATA_UPDATE",
    "deleted": "OBJECT_DELETE",
    "archived": "OBJECT_ARCHIVE",
}
PAYLOAD_FORMATS = ("JSON_API_V1", "NONE")
MOST = 100  # notification configurations of a bucket
_TOPIC = re.compile(r"//pubsub\.googleapis\.com/(projects/[^/]+/topics/[^/]+)")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS storage_notifications (
    bucket TEXT NOT NULL, id INTEGER NOT NULL, config TEXT NOT NULL, PRIMARY KEY (bucket, id)
) WITHOUT ROWID
"""


class Topics(Protocol):
    """Where notifications go: the topics of the Pub/Sub emulator."""

    def has_topic(self, name: str) -> bool: ...

    def enqueue(self, topic: str, data: bytes, attributes: Mapping[str, str]) -> str:
        """Raises ApiError for a topic that does not exist."""


class Notifications:
    """The configurations of all buckets, their routes, and the messages. Without `topics` none can be created."""

    def __init__(self, db: Database, buckets: Buckets, topics: Topics | None) -> None:
        self._db = db
        self._buckets = buckets
        self._topics = topics
        db.connection.execute(_SCHEMA)

    def routes(self) -> list[Route]:
        return [
            Route("GET", "b/{bucket}/notificationConfigs", self.list),
            Route("POST", "b/{bucket}/notificationConfigs", self.insert),
            Route("GET", "b/{bucket}/notificationConfigs/{notification}", self.get),
            Route("DELETE", "b/{bucket}/notificationConfigs/{notification}", self.delete),
        ]

    def publish(self, change: ObjectChange) -> None:
        """Queue the change's messages, inside the transaction of the change."""
        resource = change.resource
        for config in self._of(resource["bucket"]):
            types, prefix = config.get("event_types"), config.get("object_name_prefix", "")
            kind = EVENT_TYPES[change.event]
            if (types and kind not in types) or not resource["name"].startswith(prefix):
                continue
            data = json.dumps(resource).encode() if config["payload_format"] == "JSON_API_V1" else b""
            self._send(_topic(config), data, _attributes(config, kind, change))

    async def list(self, call: Call) -> Reply:
        self._buckets.get(call.names["bucket"])
        items = [_resource(call, config) for config in self._of(call.names["bucket"])]
        return Reply({"kind": "storage#notifications", **({"items": items} if items else {})})

    async def insert(self, call: Call) -> Reply:
        bucket, config = call.names["bucket"], _checked(parse_json(call.body))
        if self._topics is None:
            raise not_emulated("a notification without an emulated Pub/Sub")
        with self._db.transaction() as connection:
            self._buckets.get(bucket)
            if not self._topics.has_topic(_topic(config)):
                raise StorageError(404, "notFound", f"Topic {_topic(config)!r} does not exist; create it first")
            known = self._of(bucket)
            if len(known) == MOST:
                raise StorageError(429, "rateLimitExceeded", f"{bucket!r} has {MOST} notification configurations")
            config |= {"id": str(1 + max((int(each["id"]) for each in known), default=0)), "bucket": bucket}
            row = (bucket, int(config["id"]), json.dumps(config))
            connection.execute("INSERT INTO storage_notifications VALUES (?, ?, ?)", row)
        return Reply(_resource(call, config))

    async def get(self, call: Call) -> Reply:
        return Reply(_resource(call, self._find(call)))

    async def delete(self, call: Call) -> Reply:
        config = self._find(call)
        self._db.write(
            "DELETE FROM storage_notifications WHERE bucket = ? AND id = ?", (config["bucket"], int(config["id"]))
        )
        return Reply(status=204)

    def _find(self, call: Call) -> dict[str, Any]:
        bucket, wanted = call.names["bucket"], call.names["notification"]
        self._buckets.get(bucket)
        if config := next((each for each in self._of(bucket) if each["id"] == wanted), None):
            return config
        raise StorageError(404, "notFound", f"The specified notification does not exist: {bucket}/{wanted}")

    def _of(self, bucket: str) -> Sequence[dict[str, Any]]:
        rows = self._db.rows("SELECT config FROM storage_notifications WHERE bucket = ? ORDER BY id", (bucket,))
        return [json.loads(row["config"]) for row in rows]

    def _send(self, topic: str, data: bytes, attributes: Mapping[str, str]) -> None:
        assert self._topics is not None, "a configuration was created with topics"
        try:
            self._topics.enqueue(topic, data, attributes)
        except ApiError as error:
            if error.status != "NOT_FOUND":  # Google drops the messages to a topic that was deleted
                raise


def _topic(config: Mapping[str, Any]) -> str:
    match = _TOPIC.fullmatch(config["topic"])
    assert match, "the topic was checked"
    return match[1]


def _attributes(config: Mapping[str, Any], kind: str, change: ObjectChange) -> dict[str, str]:
    resource = change.resource
    attributes = {
        **config.get("custom_attributes", {}),
        "notificationConfig": f"projects/_/buckets/{resource['bucket']}/notificationConfigs/{config['id']}",
        "eventType": kind,
        "payloadFormat": config["payload_format"],
        "bucketId": resource["bucket"],
        "objectId": resource["name"],
        "objectGeneration": resource["generation"],
        "eventTime": resource.get("timeDeleted") or resource["updated"],
    }
    others = {"overwroteGeneration": change.overwrote, "overwrittenByGeneration": change.overwritten_by}
    return attributes | {name: str(generation) for name, generation in others.items() if generation}


def _checked(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a new configuration that callers set."""
    topic, payload = body.get("topic"), body.get("payload_format")
    if not isinstance(topic, str) or not _TOPIC.fullmatch(topic):
        raise invalid(f"Invalid topic: {topic!r}; expected //pubsub.googleapis.com/projects/PROJECT/topics/TOPIC")
    if payload not in PAYLOAD_FORMATS:
        raise invalid(f"Invalid payload_format: {payload!r}; expected one of {', '.join(PAYLOAD_FORMATS)}")
    types, attributes = body.get("event_types", []), body.get("custom_attributes", {})
    if not isinstance(types, list) or not set(map(str, types)) <= set(EVENT_TYPES.values()):
        raise invalid(f"Invalid event_types: {types!r}; expected a list of {', '.join(EVENT_TYPES.values())}")
    if not isinstance(attributes, dict) or not all(isinstance(value, str) for value in attributes.values()):
        raise invalid(f"Invalid custom_attributes: {attributes!r}; expected an object of strings")
    prefix = body.get("object_name_prefix", "")
    if not isinstance(prefix, str):
        raise invalid(f"Invalid object_name_prefix: {prefix!r}; expected a string")
    optional = {"event_types": types, "custom_attributes": attributes, "object_name_prefix": prefix}
    return {"topic": topic, "payload_format": payload} | {name: value for name, value in optional.items() if value}


def _resource(call: Call, config: dict[str, Any]) -> dict[str, Any]:
    bucket, own = config["bucket"], {name: value for name, value in config.items() if name != "bucket"}
    link = f"{call.base_url}/storage/v1/b/{bucket}/notificationConfigs/{config['id']}"
    return {"kind": "storage#notification", "selfLink": link, "etag": etag_of(None, int(config["id"])), **own}
