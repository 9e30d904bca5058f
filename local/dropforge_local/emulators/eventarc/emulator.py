"""Eventarc: triggers that turn storage changes and published messages into CloudEvents at a destination.

As in the cloud, each trigger owns a push subscription and, for storage events, a transport topic. Pub/Sub's delivery
loop gives at-least-once delivery, backoff, 24 h retention and dead letters. An event is stored in the transaction that
changes the object. The transport topic carries binary-mode CloudEvents: the message attributes are the headers.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol
from urllib.parse import quote

from aiohttp import web

from dropforge_local.base.errors import ApiError

from ..kit.emulator import PassiveEmulator
from ..kit.routing import Call, Route, mount
from ..kit.times import rfc3339
from ..pubsub import PubSubEmulator
from ..pubsub.push import MESSAGE_PUBLISHED
from .rules import STORAGE_EVENT, Trigger, check_trigger

RETENTION = "86400s"
MAXIMUM_BACKOFF_SECONDS = 600.0
ACK_DEADLINE_SECONDS = 600  # a function may take up to 540 s for an event

SCHEMA = """
CREATE TABLE IF NOT EXISTS eventarc_triggers (
    name TEXT PRIMARY KEY, uid TEXT NOT NULL, config TEXT NOT NULL, created REAL NOT NULL, updated REAL NOT NULL);
"""


class Change(Protocol):
    """A storage change (emulators/storage's ObjectChange): the event type's last word, StorageObjectData as JSON."""

    @property
    def event(self) -> str: ...

    @property
    def resource(self) -> dict[str, Any]: ...


class EventarcRouter(PassiveEmulator):
    """The triggers of one project and location. Delivery starts and stops with the Pub/Sub emulator."""

    def __init__(
        self, pubsub: PubSubEmulator, project: str, location: str, minimum_backoff_seconds: float = 10.0
    ) -> None:
        self.pubsub = pubsub
        self.db = pubsub.db
        self.parent = f"projects/{project}/locations/{location}"
        self.project = project
        self.location = location
        self.minimum_backoff_seconds = minimum_backoff_seconds
        self.db.connection.executescript(SCHEMA)

    def ensure_trigger(self, trigger: Trigger) -> None:
        """Create the trigger, or change it to this description; idempotent.

        A new destination or dead-letter topic keeps the undelivered events; a new event type or filter drops them.
        """
        check_trigger(trigger)
        now = self.pubsub.clock.now()
        with self.db.transaction() as sql:
            former = self._trigger(trigger.name)
            if former and (former.event_type, former.filters) != (trigger.event_type, trigger.filters):
                self.pubsub.delete_subscription(self._subscription(former))
            self._subscribe(trigger)
            sql.execute(
                "INSERT INTO eventarc_triggers VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "config = excluded.config, updated = CASE config WHEN excluded.config THEN updated ELSE ? END",
                (trigger.name, str(uuid.uuid4()), json.dumps(asdict(trigger), sort_keys=True), now, now, now),
            )

    def on_object_change(self, change: Change) -> None:
        """Queue the change for every trigger on its bucket, inside the storage emulator's transaction."""
        bucket = change.resource["bucket"]
        event_type = STORAGE_EVENT + change.event
        triggers = [t for t in self._triggers() if (t.event_type, t.filters) == (event_type, {"bucket": bucket})]
        if not triggers:
            return
        attributes = {
            "ce-specversion": "1.0",
            "ce-id": str(uuid.uuid4()),
            "ce-source": f"//storage.googleapis.com/projects/_/buckets/{bucket}",
            "ce-type": event_type,
            "ce-subject": _header_value(f"objects/{change.resource['name']}"),
            "ce-time": rfc3339(self.pubsub.clock.now()),
            "ce-bucket": bucket,
            "content-type": "application/json",
        }
        for trigger in triggers:
            self.pubsub.enqueue(self._transport_topic(trigger), json.dumps(change.resource).encode(), attributes)

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        triggers = "/v1/{parent=projects/*/locations/*}/triggers"
        return mount([Route("GET", triggers, self._list), Route("GET", f"{triggers}/{{name}}", self._get)])

    def _subscribe(self, trigger: Trigger) -> None:
        """The trigger's push subscription, on its own transport topic or on the filtered topic."""
        no_wrapper = {"noWrapper": {"writeMetadata": True}}
        published = trigger.event_type == MESSAGE_PUBLISHED
        account = f"eventarc@{self.project}.iam.gserviceaccount.com"
        config: dict[str, Any] = {
            "pushConfig": {
                "pushEndpoint": trigger.destination_url,
                "oidcToken": {"serviceAccountEmail": account, "audience": trigger.destination_url},
                **({} if published else no_wrapper),
            },
            "ackDeadlineSeconds": ACK_DEADLINE_SECONDS,
            "messageRetentionDuration": RETENTION,
            "expirationPolicy": {},
            "retryPolicy": {
                "minimumBackoff": f"{self.minimum_backoff_seconds:.6f}s",
                "maximumBackoff": f"{MAXIMUM_BACKOFF_SECONDS:.0f}s",
            },
        }
        if trigger.dead_letter_topic:
            attempts = {"maxDeliveryAttempts": trigger.delivery_attempts} if trigger.delivery_attempts else {}
            config["deadLetterPolicy"] = {"deadLetterTopic": trigger.dead_letter_topic, **attempts}
        topic = self._transport_topic(trigger)
        if not published:
            self.pubsub.create_topic(topic)
        self.pubsub.create_subscription(self._subscription(trigger), topic, config, cloud_event=published)

    def _transport_topic(self, trigger: Trigger) -> str:
        if trigger.event_type == MESSAGE_PUBLISHED:
            return trigger.filters["topic"]
        return f"projects/{self.project}/topics/{self._transport_id(trigger)}"

    def _subscription(self, trigger: Trigger) -> str:
        return f"projects/{self.project}/subscriptions/{self._transport_id(trigger)}"

    def _transport_id(self, trigger: Trigger) -> str:
        digest = hashlib.sha256(f"{self.parent}/{trigger.name}".encode()).hexdigest()
        return f"eventarc-{self.location}-{trigger.name}-{digest[:6]}"

    def _trigger(self, name: str) -> Trigger | None:
        return next((trigger for trigger in self._triggers() if trigger.name == name), None)

    def _triggers(self) -> list[Trigger]:
        rows = self.db.rows("SELECT config FROM eventarc_triggers ORDER BY name")
        return [Trigger(**json.loads(row["config"])) for row in rows]

    def _list(self, call: Call) -> dict[str, Any]:
        self._check_parent(call)
        rows = self.db.rows("SELECT * FROM eventarc_triggers ORDER BY name")
        return {"triggers": [self._resource(dict(row)) for row in rows]}

    def _get(self, call: Call) -> dict[str, Any]:
        self._check_parent(call)
        name = call.names["name"]
        row = self.db.row("SELECT * FROM eventarc_triggers WHERE name = ?", (name,))
        if row is None:
            raise ApiError("NOT_FOUND", f"Resource '{self.parent}/triggers/{name}' was not found")
        return self._resource(dict(row))

    def _check_parent(self, call: Call) -> None:
        if call.names["parent"] != self.parent:
            raise ApiError("NOT_FOUND", f"the local stack's triggers are in {self.parent!r}")

    def _resource(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The trigger as eventarc.googleapis.com/v1 returns it."""
        trigger = Trigger(**json.loads(row["config"]))
        filters = {"type": trigger.event_type} | {k: v for k, v in trigger.filters.items() if k != "topic"}
        transport = {"topic": self._transport_topic(trigger), "subscription": self._subscription(trigger)}
        return {
            "name": f"{self.parent}/triggers/{trigger.name}",
            "uid": row["uid"],
            "createTime": rfc3339(row["created"]),
            "updateTime": rfc3339(row["updated"]),
            "eventFilters": [{"attribute": key, "value": value} for key, value in filters.items()],
            "destination": {"httpEndpoint": {"uri": trigger.destination_url}},
            "transport": {"pubsub": transport},
        }


def _header_value(text: str) -> str:
    """Percent-encode the characters that CloudEvents' HTTP binding forbids in a header (section 3.1.3.2)."""
    return quote(text, safe="!#$&'()*+,-./:;<=>?@[\\]^_`{|}~")
