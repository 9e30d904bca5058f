"""Topics, subscriptions and snapshots as rows: each resource's protobuf message, and columns that queries need."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from google.cloud.pubsub_v1 import types

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ..kit.paging import Paging, cut, read_token
from ..kit.rpc import Message
from ..kit.times import seconds_of
from .rules import DELETED_TOPIC

Topic = types.Topic.pb()
SubscriptionConfig = types.Subscription.pb()
Snapshot = types.Snapshot.pb()
PAGING = Paging(default=100, largest=1000)
# A push without a retry policy backs off from 100 ms to 60 s (https://cloud.google.com/pubsub/docs/push#push_backoff);
# a pull redelivers at once. A short pause here keeps a subscriber that always nacks from using a whole core.
PUSH_BACKOFF_SECONDS = (0.1, 60.0)
PULL_BACKOFF_SECONDS = (0.01, 1.0)

SCHEMA = """
CREATE TABLE IF NOT EXISTS pubsub_topics (name TEXT PRIMARY KEY, config BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS pubsub_subscriptions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, topic TEXT NOT NULL, config BLOB NOT NULL,
    cloud_event INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS pubsub_subscriptions_topic ON pubsub_subscriptions (topic);
CREATE TABLE IF NOT EXISTS pubsub_snapshots (
    name TEXT PRIMARY KEY, topic TEXT NOT NULL, config BLOB NOT NULL, last_message INTEGER NOT NULL,
    expires REAL NOT NULL);
CREATE TABLE IF NOT EXISTS pubsub_snapshot_messages (
    snapshot TEXT NOT NULL, message INTEGER NOT NULL, PRIMARY KEY (snapshot, message)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pubsub_snapshots_topic ON pubsub_snapshots (topic);
"""


@dataclass(frozen=True)
class Subscription:
    """A stored subscription. With `cloud_event`, a push is a messagePublished event in binary mode, as at Eventarc."""

    id: int
    name: str
    topic: str
    config: Message
    cloud_event: bool

    @property
    def is_push(self) -> bool:
        return bool(self.config.push_config.push_endpoint) and not self.config.detached

    @property
    def ordered(self) -> bool:
        return bool(self.config.enable_message_ordering)

    @property
    def retention_seconds(self) -> float:
        return seconds_of(self.config.message_retention_duration)

    @property
    def max_delivery_attempts(self) -> int | None:
        """None without a dead-letter policy; the service then reports no attempts to the subscriber either."""
        if not self.config.HasField("dead_letter_policy"):
            return None
        return int(self.config.dead_letter_policy.max_delivery_attempts)

    def retry_delay_seconds(self, failures: int) -> float:
        """The delay of a message after its `failures`-th failure."""
        if self.config.HasField("retry_policy"):
            policy = self.config.retry_policy
            lowest, highest = seconds_of(policy.minimum_backoff), seconds_of(policy.maximum_backoff)
        else:
            lowest, highest = PUSH_BACKOFF_SECONDS if self.is_push else PULL_BACKOFF_SECONDS
        return min(highest, lowest * 2.0 ** min(failures - 1, 30))


class Resources:
    """The three tables. The service validates and wakes; these methods do neither."""

    def __init__(self, db: Database) -> None:
        self.db = db
        db.connection.executescript(SCHEMA)

    def topic(self, name: str) -> Message:
        return Topic.FromString(self._row("topics", name)["config"])

    def exists(self, collection: str, name: str) -> bool:
        """Whether one of the topics, subscriptions or snapshots has this name."""
        query = f"SELECT 1 FROM pubsub_{collection} WHERE name = ?"
        return self.db.row(query, (name,)) is not None

    def save_topic(self, topic: Message) -> None:
        self.db.write(
            "INSERT INTO pubsub_topics VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET config = excluded.config",
            (topic.name, topic.SerializeToString()),
        )

    def delete_topic(self, name: str) -> None:
        """Delete a topic. Its subscriptions and snapshots stay, with the topic `_deleted-topic_`."""
        with self.db.transaction() as sql:
            for subscription in self.subscriptions_of(name):
                subscription.config.topic = DELETED_TOPIC
                self.save_subscription(subscription.config, subscription.cloud_event)
            for snapshot in self._snapshots("topic = ?", name):
                snapshot.topic = DELETED_TOPIC
                sql.execute(
                    "UPDATE pubsub_snapshots SET topic = ?, config = ? WHERE name = ?",
                    (DELETED_TOPIC, snapshot.SerializeToString(), snapshot.name),
                )
            sql.execute("DELETE FROM pubsub_topics WHERE name = ?", (name,))

    def subscription(self, name: str) -> Subscription:
        return _subscription(self._row("subscriptions", name))

    def subscription_by_id(self, subscription_id: int) -> Subscription | None:
        row = self.db.row("SELECT * FROM pubsub_subscriptions WHERE id = ?", (subscription_id,))
        return None if row is None else _subscription(row)

    def subscriptions_of(self, topic: str) -> list[Subscription]:
        rows = self.db.rows("SELECT * FROM pubsub_subscriptions WHERE topic = ? ORDER BY name", (topic,))
        return [_subscription(row) for row in rows]

    def push_subscriptions(self) -> list[Subscription]:
        rows = self.db.rows("SELECT * FROM pubsub_subscriptions")
        return [subscription for subscription in map(_subscription, rows) if subscription.is_push]

    def save_subscription(self, config: Message, cloud_event: bool = False) -> Subscription:
        with self.db.transaction() as sql:
            sql.execute(
                "INSERT INTO pubsub_subscriptions (name, topic, config, cloud_event) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET topic = excluded.topic, config = excluded.config, "
                "cloud_event = excluded.cloud_event",
                (config.name, config.topic, config.SerializeToString(), cloud_event),
            )
            return self.subscription(config.name)

    def delete_subscription(self, subscription: Subscription) -> None:
        self.db.write("DELETE FROM pubsub_subscriptions WHERE id = ?", (subscription.id,))

    def snapshot(self, name: str) -> Message:
        return Snapshot.FromString(self._row("snapshots", name)["config"])

    def save_snapshot(self, snapshot: Message, last_message: int, expires: float) -> None:
        self.db.write(
            "INSERT INTO pubsub_snapshots VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET config = excluded.config",
            (snapshot.name, snapshot.topic, snapshot.SerializeToString(), last_message, expires),
        )

    def delete_snapshot(self, name: str) -> None:
        with self.db.transaction() as sql:
            sql.execute("DELETE FROM pubsub_snapshots WHERE name = ?", (name,))
            sql.execute("DELETE FROM pubsub_snapshot_messages WHERE snapshot = ?", (name,))

    def expire_snapshots(self, now: float) -> None:
        expired = "SELECT name FROM pubsub_snapshots WHERE expires <= ?"
        for row in self.db.rows(expired, (now,)):
            self.delete_snapshot(row["name"])

    def snapshots_of(self, topic: str) -> list[str]:
        return [snapshot.name for snapshot in self._snapshots("topic = ? ORDER BY name", topic)]

    def page(self, collection: str, request: Message) -> tuple[list[Message], str]:
        """One page of a project's topics, subscriptions or snapshots by name, and the next page's token."""
        kind = {"topics": Topic, "subscriptions": SubscriptionConfig, "snapshots": Snapshot}[collection]
        prefix = f"{request.project}/{collection}/"
        size, [last] = PAGING.size(request.page_size), read_token(request.page_token, [""])
        rows = self.db.rows(
            f"SELECT name, config FROM pubsub_{collection} WHERE name > ? AND name >= ? AND name < ? "
            "ORDER BY name LIMIT ?",
            (last, prefix, prefix[:-1] + "0", size + 1),  # "0" follows "/" in ASCII
        )
        page, token = cut(rows, size, lambda row: [row["name"]])
        return [kind.FromString(row["config"]) for row in page], token

    def _row(self, collection: str, name: str) -> sqlite3.Row:
        query = f"SELECT * FROM pubsub_{collection} WHERE name = ?"
        if (row := self.db.row(query, (name,))) is None:
            raise not_found(name)
        return row

    def _snapshots(self, where: str, value: str) -> Iterator[Message]:
        rows = self.db.rows(f"SELECT config FROM pubsub_snapshots WHERE {where}", (value,))
        return (Snapshot.FromString(row["config"]) for row in rows)


def describe(subscription: Subscription, resources: Resources) -> Message:
    """The subscription as the API returns it, with its output-only fields."""
    answer = SubscriptionConfig()
    answer.CopyFrom(subscription.config)
    answer.state = 1  # ACTIVE
    if resources.exists("topics", subscription.topic):
        topic = resources.topic(subscription.topic)
        if topic.HasField("message_retention_duration"):
            answer.topic_message_retention_duration.CopyFrom(topic.message_retention_duration)
    return answer


def not_found(name: str) -> ApiError:
    return ApiError("NOT_FOUND", f"Resource not found (resource={name}).")


def _subscription(row: sqlite3.Row) -> Subscription:
    config = SubscriptionConfig.FromString(row["config"])
    return Subscription(row["id"], row["name"], row["topic"], config, bool(row["cloud_event"]))
