"""Every subscription's backlog in SQLite: ready, leased and acknowledged messages.

A delivery is one message for one subscription. Without a lease it is *ready* from its `due` time on; with a lease it is
*leased* until its `due` time. A failure (nack, expired lease, failed push) delays `due` by the retry policy, or moves
the message to the dead-letter topic. An ack removes the row, or marks it if the subscription retains acked messages.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ..kit.times import seconds_of, timestamp
from .faults import DeliveryFaults
from .filters import compile_filter
from .resources import Resources, Subscription
from .rules import DELETED_TOPIC, invalid

MAX_BATCH_BYTES = 4 * 2**20

SCHEMA = """
CREATE TABLE IF NOT EXISTS pubsub_messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, data BLOB NOT NULL, attributes TEXT NOT NULL,
    ordering_key TEXT NOT NULL, published REAL NOT NULL, keep_until REAL NOT NULL);
CREATE INDEX IF NOT EXISTS pubsub_messages_keep ON pubsub_messages (keep_until) WHERE keep_until > 0;
CREATE TABLE IF NOT EXISTS pubsub_deliveries (
    subscription INTEGER NOT NULL, message INTEGER NOT NULL, ordering_key TEXT NOT NULL, failures INTEGER NOT NULL,
    due REAL NOT NULL, lease INTEGER, expires REAL NOT NULL, acked INTEGER NOT NULL,
    PRIMARY KEY (subscription, message)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pubsub_deliveries_due ON pubsub_deliveries (subscription, due) WHERE NOT acked;
CREATE INDEX IF NOT EXISTS pubsub_deliveries_leased ON pubsub_deliveries (due) WHERE lease IS NOT NULL;
CREATE INDEX IF NOT EXISTS pubsub_deliveries_expires ON pubsub_deliveries (expires);
CREATE INDEX IF NOT EXISTS pubsub_deliveries_message ON pubsub_deliveries (message);
CREATE INDEX IF NOT EXISTS pubsub_deliveries_key
    ON pubsub_deliveries (subscription, ordering_key, message) WHERE ordering_key != '' AND NOT acked;
"""
READY = """
SELECT d.subscription, d.message, d.failures, d.due, d.lease, d.ordering_key, m.data, m.attributes,
    m.ordering_key AS message_key, m.published
FROM pubsub_deliveries d JOIN pubsub_messages m ON m.id = d.message
WHERE d.subscription = :subscription AND NOT d.acked AND d.lease IS NULL AND d.due <= :now
"""
# In an ordered subscription a message waits while an earlier message of its key is leased or delayed.
HEAD_OF_KEY = """
AND NOT EXISTS (
    SELECT 1 FROM pubsub_deliveries e WHERE e.subscription = d.subscription AND e.ordering_key = d.ordering_key
    AND e.ordering_key != '' AND NOT e.acked AND e.message < d.message AND (e.lease IS NOT NULL OR e.due > :now))
"""
# No delivery, topic retention or snapshot needs the message any more.
UNUSED = """
keep_until <= :now AND NOT EXISTS (SELECT 1 FROM pubsub_deliveries d WHERE d.message = pubsub_messages.id)
AND NOT EXISTS (SELECT 1 FROM pubsub_snapshots s WHERE s.topic = pubsub_messages.topic)
"""


@dataclass(frozen=True)
class Content:
    """A message as its publisher sends it."""

    data: bytes
    attributes: Mapping[str, str]
    ordering_key: str = ""


@dataclass(frozen=True)
class Undelivered:
    """The messages of a subscription without an acknowledgement, and when the oldest was published (0: none)."""

    messages: int
    oldest: float


@dataclass(frozen=True)
class Delivery:
    """A message leased to a subscriber; `attempt` counts from 1."""

    subscription: int
    message: int
    lease: int
    attempt: int
    content: Content
    published: float

    @property
    def ack_id(self) -> str:
        return f"{self.subscription:x}-{self.message:x}-{self.lease:x}"

    @property
    def size_bytes(self) -> int:
        return len(self.content.data) + sum(len(key) + len(value) for key, value in self.content.attributes.items())


@dataclass(frozen=True)
class AckId:
    """A parsed ack id: a message and its lease."""

    message: int
    lease: int

    @classmethod
    def parse(cls, subscription: Subscription, text: str) -> AckId:
        """Raises INVALID_ARGUMENT when `text` is not an ack id of `subscription`."""
        try:
            owner, message, lease = (int(part, 16) for part in text.split("-"))
        except ValueError as error:
            raise invalid(f"invalid ack ID {text!r}") from error
        if owner != subscription.id or not (0 < message < 2**63 and 0 < lease < 2**63):
            raise invalid(f"invalid ack ID {text!r}: it belongs to another subscription than {subscription.name}")
        return cls(message, lease)


class Backlog:
    """The state transitions, one transaction each. The hooks run after commit.

    `wake(subscription_id)`: a message may be ready. `release(leases)`: these leases have ended.
    `deadline(when)`: `expire` must run at that time.
    """

    def __init__(self, db: Database, clock: Clock, resources: Resources) -> None:
        self.db = db
        self.clock = clock
        self.resources = resources
        self.faults = DeliveryFaults()
        self.wake: Callable[[int], None] = lambda subscription: None
        self.release: Callable[[Sequence[int]], None] = lambda leases: None
        self.deadline: Callable[[float], None] = lambda when: None
        # Starts at the time, so that no earlier process on this database gave out the same lease.
        self._leases = itertools.count(time.time_ns())
        db.connection.executescript(SCHEMA)

    def now(self) -> float:
        return round(self.clock.now(), 6)  # publish times carry microseconds

    def publish(self, topic: str, contents: Sequence[Content]) -> list[int]:
        """Append the messages to the topic's subscriptions; raises NOT_FOUND for an unknown topic."""
        now = self.now()
        with self.db.transaction() as sql:
            retention = seconds_of(self.resources.topic(topic).message_retention_duration)
            keep_until = now + retention if retention else 0.0
            ids = [self._insert(sql, topic, content, now, keep_until) for content in contents]
            subscriptions = [s for s in self.resources.subscriptions_of(topic) if not s.config.detached]
            for subscription in subscriptions:
                self.append(subscription, zip(ids, contents, itertools.repeat(now), strict=False), now)
            if not subscriptions or any(s.config.filter for s in subscriptions):
                sql.execute(
                    f"DELETE FROM pubsub_messages WHERE id BETWEEN :first AND :last AND {UNUSED}",
                    {"first": ids[0], "last": ids[-1], "now": now},
                )
            if keep_until:
                self.db.after_commit(lambda: self.deadline(keep_until))
        return ids

    def append(self, subscription: Subscription, messages: Iterable[tuple[int, Content, float]], now: float) -> None:
        """Give `subscription` the stored messages (id, content, publish time) that its filter matches."""
        matches = compile_filter(subscription.config.filter)
        rows = []
        for message, content, published in messages:
            if matches(content.attributes):
                key = content.ordering_key if subscription.ordered else ""
                due = now + self.faults.hold_back_seconds(subscription.id, message, bool(key))
                rows.append((subscription.id, message, key, due, published + subscription.retention_seconds))
        if not rows:
            return
        with self.db.transaction() as sql:
            sql.executemany("INSERT INTO pubsub_deliveries VALUES (?, ?, ?, 0, ?, NULL, ?, 0)", rows)
            self.db.after_commit(lambda: self.deadline(rows[0][-1]))
            self.announce(subscription)

    def claim(
        self, subscription: Subscription, limit: int, lease_seconds: float, now: float, one_per_key: bool = False
    ) -> list[Delivery]:
        """Lease up to `limit` ready messages; in publish order if the subscription is ordered.

        `one_per_key` keeps a single message of an ordering key outstanding, as push delivery does.
        """
        self.expire(now)
        order = HEAD_OF_KEY + "ORDER BY d.message" if subscription.ordered else "ORDER BY d.due, d.message"
        rows = self.db.rows(
            f"{READY} {order} LIMIT :limit", {"subscription": subscription.id, "now": now, "limit": limit}
        )
        if not rows:
            return []
        with self.db.transaction() as sql:
            batch = self._lease(subscription, self._without_dropped(subscription, rows, now), one_per_key)
            sql.executemany(
                "UPDATE pubsub_deliveries SET lease = ?, due = ? WHERE subscription = ? AND message = ?",
                [(item.lease, now + lease_seconds, item.subscription, item.message) for item in batch],
            )
            self.db.after_commit(lambda: self.deadline(now + lease_seconds))
        return batch

    def undelivered(self, subscription: Subscription) -> Undelivered:
        """What waits for an acknowledgement, ready and leased. It changes nothing."""
        [row] = self.db.rows(
            "SELECT COUNT(*), MIN(m.published) FROM pubsub_deliveries d JOIN pubsub_messages m ON m.id = d.message "
            "WHERE d.subscription = ? AND NOT d.acked AND d.expires > ?",
            (subscription.id, self.now()),
        )
        return Undelivered(int(row[0]), float(row[1] or 0))

    def next_due(self, subscription: Subscription, after: float) -> float | None:
        """When the next delayed message becomes ready; None without a delayed message."""
        [row] = self.db.rows(
            "SELECT MIN(due) FROM pubsub_deliveries WHERE subscription = ? AND NOT acked AND lease IS NULL AND due > ?",
            (subscription.id, after),
        )
        return None if row[0] is None else float(row[0])

    def acknowledge(self, subscription: Subscription, ack_ids: Sequence[str]) -> list[str]:
        """Ack, and return the ids that exactly-once delivery refuses (expired or used before).

        Without exactly-once delivery a late ack still counts, as in the service's best-effort delivery.
        """
        parsed = [(text, AckId.parse(subscription, text)) for text in ack_ids]
        now = self.now()
        rejected, ended = [], []
        with self.db.transaction() as sql:
            for text, ack in parsed:
                row = self._row(sql, subscription, ack.message)
                current = row is not None and row["lease"] == ack.lease and row["due"] > now
                if subscription.config.enable_exactly_once_delivery and not current:
                    rejected.append(text)
                elif row is not None and not row["acked"]:
                    ended.append(row["lease"])
                    self._acknowledge(sql, subscription, row, now)
            self.announce(subscription, ended)
        return rejected

    def modify_deadline(self, subscription: Subscription, ack_ids: Sequence[str], deadline_seconds: float) -> list[str]:
        """Extend leases, or nack with 0. Returns the ids whose lease has already ended; these are left unchanged."""
        parsed = [(text, AckId.parse(subscription, text)) for text in ack_ids]
        now = self.now()
        rejected, failed = [], []
        with self.db.transaction() as sql:
            for text, ack in parsed:
                row = self._row(sql, subscription, ack.message)
                if row is None or row["lease"] != ack.lease or row["due"] <= now:
                    rejected.append(text)
                elif deadline_seconds == 0:
                    failed.append(row)
                else:
                    sql.execute(
                        "UPDATE pubsub_deliveries SET due = ? WHERE subscription = ? AND message = ?",
                        (now + deadline_seconds, subscription.id, ack.message),
                    )
            self._fail(sql, subscription, failed, now)
        return rejected

    def expire(self, now: float) -> None:
        """End the leases, retentions and snapshots that have expired at `now`."""
        due = self.next_expiry()
        if due is None or due > now:
            return
        with self.db.transaction() as sql:
            leased = sql.execute(
                "SELECT * FROM pubsub_deliveries WHERE lease IS NOT NULL AND due <= ? ORDER BY subscription, message",
                (now,),
            ).fetchall()
            for subscription_id, rows in itertools.groupby(leased, key=lambda row: int(row["subscription"])):
                if subscription := self.resources.subscription_by_id(subscription_id):
                    self._fail(sql, subscription, list(rows), now)
            sql.execute("DELETE FROM pubsub_deliveries WHERE expires <= ?", (now,))
            self.collect(now)

    def next_expiry(self) -> float | None:
        """When the next lease, retention or snapshot expires; None without one."""
        [row] = self.db.rows(
            "SELECT (SELECT MIN(due) FROM pubsub_deliveries WHERE lease IS NOT NULL), "
            "(SELECT MIN(expires) FROM pubsub_deliveries), (SELECT MIN(expires) FROM pubsub_snapshots), "
            "(SELECT MIN(keep_until) FROM pubsub_messages WHERE keep_until > 0)"
        )
        return min((float(when) for when in row if when is not None), default=None)

    def collect(self, now: float) -> None:
        """Delete expired snapshots, and messages that nothing needs."""
        with self.db.transaction() as sql:
            self.resources.expire_snapshots(now)
            sql.execute("UPDATE pubsub_messages SET keep_until = 0 WHERE keep_until > 0 AND keep_until <= ?", (now,))
            sql.execute(f"DELETE FROM pubsub_messages WHERE {UNUSED}", {"now": now})

    def apply_retention(self, subscription: Subscription) -> None:
        """Apply a changed retention to the messages that the subscription already has."""
        with self.db.transaction() as sql:
            sql.execute(
                "UPDATE pubsub_deliveries SET expires = ? + "
                "(SELECT published FROM pubsub_messages m WHERE m.id = message) WHERE subscription = ?",
                (subscription.retention_seconds, subscription.id),
            )
            self.db.after_commit(lambda: self.deadline(0))

    def drop_retained(self, topic: str) -> None:
        """Drop the retained messages of a deleted topic; its subscriptions keep their backlogs."""
        with self.db.transaction() as sql:
            sql.execute("UPDATE pubsub_messages SET topic = ?, keep_until = 0 WHERE topic = ?", (DELETED_TOPIC, topic))
            self.collect(self.now())

    def clear(self, subscription: Subscription) -> None:
        """Drop the backlog of a deleted or detached subscription."""
        with self.db.transaction() as sql:
            rows = sql.execute(
                "SELECT lease FROM pubsub_deliveries WHERE subscription = ? AND lease IS NOT NULL", (subscription.id,)
            ).fetchall()
            sql.execute("DELETE FROM pubsub_deliveries WHERE subscription = ?", (subscription.id,))
            self.collect(self.now())
            self.announce(subscription, [row["lease"] for row in rows])

    def recover(self) -> None:
        """After a restart no push is in progress: end the leases of pushes, without counting a failure."""
        with self.db.transaction() as sql:
            for subscription in self.resources.push_subscriptions():
                sql.execute(
                    "UPDATE pubsub_deliveries SET lease = NULL, due = ? WHERE subscription = ? AND lease IS NOT NULL",
                    (self.now(), subscription.id),
                )

    def settle(self, sql: sqlite3.Connection, subscription: Subscription, message: int, now: float) -> None:
        """Mark a delivery as acknowledged; remove it unless the subscription retains acked messages."""
        key = (subscription.id, message)
        if subscription.config.retain_acked_messages:
            sql.execute(
                "UPDATE pubsub_deliveries SET acked = 1, lease = NULL WHERE subscription = ? AND message = ?", key
            )
            return
        sql.execute("DELETE FROM pubsub_deliveries WHERE subscription = ? AND message = ?", key)
        sql.execute(f"DELETE FROM pubsub_messages WHERE id = :id AND {UNUSED}", {"id": message, "now": now})

    def announce(self, subscription: Subscription, ended: Sequence[int | None] = ()) -> None:
        """After commit, report the leases that ended and wake the tasks that wait for the subscription."""
        leases = [lease for lease in ended if lease is not None]
        if leases:
            self.db.after_commit(lambda: self.release(leases))
        self.db.after_commit(lambda: self.wake(subscription.id))

    def _insert(self, sql: sqlite3.Connection, topic: str, content: Content, now: float, keep_until: float) -> int:
        cursor = sql.execute(
            "INSERT INTO pubsub_messages (topic, data, attributes, ordering_key, published, keep_until) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (topic, content.data, json.dumps(dict(content.attributes)), content.ordering_key, now, keep_until),
        )
        return int(cursor.lastrowid or 0)

    def _without_dropped(self, subscription: Subscription, rows: list[sqlite3.Row], now: float) -> list[sqlite3.Row]:
        """The rows whose first delivery the `faults` do not drop."""
        if not self.faults.drop_first:
            return rows
        lost = [
            row for row in rows if row["failures"] == 0 and self.faults.drops_first(subscription.id, row["message"])
        ]
        self._fail(self.db.connection, subscription, lost, now)
        keys = {row["ordering_key"] for row in lost} - {""}
        return [row for row in rows if row not in lost and row["ordering_key"] not in keys]

    def _lease(self, subscription: Subscription, rows: list[sqlite3.Row], one_per_key: bool) -> list[Delivery]:
        batch: list[Delivery] = []
        keys: set[str] = set()
        size = 0
        for row in rows:
            if one_per_key and row["ordering_key"] in keys:
                continue
            size += len(row["data"])
            if batch and size > MAX_BATCH_BYTES:
                break
            keys |= {row["ordering_key"]} - {""}
            content = Content(row["data"], json.loads(row["attributes"]), row["message_key"])
            lease, attempt = next(self._leases), row["failures"] + 1
            batch.append(Delivery(subscription.id, row["message"], lease, attempt, content, row["published"]))
        return batch

    def _row(self, sql: sqlite3.Connection, subscription: Subscription, message: int) -> sqlite3.Row | None:
        row: sqlite3.Row | None = sql.execute(
            "SELECT * FROM pubsub_deliveries WHERE subscription = ? AND message = ?", (subscription.id, message)
        ).fetchone()
        return row

    def _acknowledge(self, sql: sqlite3.Connection, subscription: Subscription, row: sqlite3.Row, now: float) -> None:
        promised = subscription.config.enable_exactly_once_delivery or row["ordering_key"]
        if row["failures"] == 0 and not promised and self.faults.duplicates(subscription.id, row["message"]):
            self._requeue(sql, row, 1, now)
            return
        self.settle(sql, subscription, row["message"], now)

    def _fail(
        self, sql: sqlite3.Connection, subscription: Subscription, rows: Sequence[sqlite3.Row], now: float
    ) -> None:
        """Count a failure of each row: delay its message, or forward the message to the dead-letter topic."""
        if not rows:
            return
        ended = [row["lease"] for row in rows]
        for row in rows:
            failures = row["failures"] + 1
            if self._dead_letter(sql, subscription, row["message"], failures, now):
                continue
            # A lease that expired earlier failed at its end, not now.
            due = min(now, row["due"]) + subscription.retry_delay_seconds(failures)
            self._requeue(sql, row, failures, due)
            if row["ordering_key"]:
                ended += self._release_followers(sql, subscription, row, due)
        self.announce(subscription, ended)

    def _requeue(self, sql: sqlite3.Connection, row: sqlite3.Row, failures: int, due: float) -> None:
        sql.execute(
            "UPDATE pubsub_deliveries SET failures = ?, due = ?, lease = NULL WHERE subscription = ? AND message = ?",
            (failures, due, row["subscription"], row["message"]),
        )

    def _release_followers(
        self, sql: sqlite3.Connection, subscription: Subscription, row: sqlite3.Row, due: float
    ) -> list[int]:
        """Release the later messages of the same ordering key: they are redelivered too, in order."""
        rows = sql.execute(
            "UPDATE pubsub_deliveries SET lease = NULL, due = ? WHERE subscription = ? AND ordering_key = ? "
            "AND message > ? AND NOT acked AND lease IS NOT NULL RETURNING lease",
            (due, subscription.id, row["ordering_key"], row["message"]),
        ).fetchall()
        return [released["lease"] for released in rows]

    def _dead_letter(
        self, sql: sqlite3.Connection, subscription: Subscription, message: int, failures: int, now: float
    ) -> bool:
        """Forward a message without attempts left; False if it has attempts left or there is no dead-letter topic."""
        limit = subscription.max_delivery_attempts
        if limit is None or failures < limit:
            return False
        row = sql.execute("SELECT * FROM pubsub_messages WHERE id = ?", (message,)).fetchone()
        _, project, _, name = subscription.name.split("/")
        source = {
            "CloudPubSubDeadLetterSourceDeliveryCount": str(failures),
            "CloudPubSubDeadLetterSourceSubscription": name,
            "CloudPubSubDeadLetterSourceSubscriptionProject": project,
            "CloudPubSubDeadLetterSourceTopicPublishTime": timestamp(row["published"]).ToJsonString(),
        }
        content = Content(row["data"], json.loads(row["attributes"]) | source, row["ordering_key"])
        try:
            self.publish(subscription.config.dead_letter_policy.dead_letter_topic, [content])
        except ApiError:  # the dead-letter topic was deleted: the message stays, as at Google
            return False
        self.settle(sql, subscription, message, now)
        return True
