"""Seek a subscription's backlog to a time or a snapshot, and take snapshots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .backlog import Backlog, Content
from .resources import Subscription
from .rules import DAY_SECONDS

SNAPSHOT_SECONDS = 7 * DAY_SECONDS
MINIMUM_SNAPSHOT_SECONDS = 3600

# Unacknowledged at the snapshot's creation, or published later.
IN_SNAPSHOT = """
(m.id > (SELECT last_message FROM pubsub_snapshots WHERE name = :snapshot)
 OR m.id IN (SELECT message FROM pubsub_snapshot_messages WHERE snapshot = :snapshot))
"""


class Replay:
    """Seek and snapshots over a backlog."""

    def __init__(self, backlog: Backlog) -> None:
        self.backlog = backlog

    def seek_to_time(self, subscription: Subscription, when: float) -> None:
        """Ack every message published before `when`; restore every retained message published since."""
        kept = "m.published >= :when AND m.keep_until > :now"
        self._seek(subscription, "m.published >= :when", kept, {"when": when})

    def seek_to_snapshot(self, subscription: Subscription, snapshot: str) -> None:
        """Leave unacked exactly the snapshot's unacked messages and every message published since."""
        self._seek(subscription, IN_SNAPSHOT, IN_SNAPSHOT, {"snapshot": snapshot})

    def take_snapshot(self, snapshot: str, subscription: Subscription) -> tuple[int, float]:
        """Store the unacked messages of the snapshot; return the newest message's id and the snapshot's expiry.

        A snapshot expires seven days after its oldest message was published.
        """
        now = self.backlog.now()
        with self.backlog.db.transaction() as sql:
            sql.execute(
                "INSERT OR REPLACE INTO pubsub_snapshot_messages "
                "SELECT ?, message FROM pubsub_deliveries WHERE subscription = ? AND NOT acked",
                (snapshot, subscription.id),
            )
            newest = sql.execute("SELECT seq FROM sqlite_sequence WHERE name = 'pubsub_messages'").fetchone()
            oldest = sql.execute(
                "SELECT MIN(published) FROM pubsub_messages JOIN pubsub_snapshot_messages ON message = id "
                "WHERE snapshot = ?",
                (snapshot,),
            ).fetchone()
        return int(newest[0]) if newest else 0, (oldest[0] or now) + SNAPSHOT_SECONDS

    def _seek(self, subscription: Subscription, wanted: str, kept: str, values: Mapping[str, Any]) -> None:
        """Unack `wanted` messages, ack all others, and add `kept` messages that the subscription no longer has."""
        now = self.backlog.now()
        values = {**values, "subscription": subscription.id, "topic": subscription.topic, "now": now}
        with self.backlog.db.transaction() as sql:
            rows = sql.execute(
                f"SELECT d.*, {wanted} AS wanted FROM pubsub_deliveries d JOIN pubsub_messages m ON m.id = d.message "
                "WHERE d.subscription = :subscription",
                values,
            ).fetchall()
            for row in rows:
                if row["wanted"] and row["acked"]:
                    sql.execute(
                        "UPDATE pubsub_deliveries SET acked = 0, failures = 0, lease = NULL, due = ? "
                        "WHERE subscription = ? AND message = ?",
                        (now, subscription.id, row["message"]),
                    )
                elif not row["wanted"] and not row["acked"]:
                    self.backlog.settle(sql, subscription, row["message"], now)
            missing = sql.execute(
                f"SELECT m.* FROM pubsub_messages m WHERE m.topic = :topic AND {kept} AND NOT EXISTS "
                "(SELECT 1 FROM pubsub_deliveries WHERE subscription = :subscription AND message = m.id) ORDER BY m.id",
                values,
            ).fetchall()
            contents = (Content(row["data"], json.loads(row["attributes"]), row["ordering_key"]) for row in missing)
            self.backlog.append(
                subscription,
                ((row["id"], content, row["published"]) for row, content in zip(missing, contents, strict=True)),
                now,
            )
            self.backlog.changed(subscription, [row["lease"] for row in rows if not row["wanted"]])
