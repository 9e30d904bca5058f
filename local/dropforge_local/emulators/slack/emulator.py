"""A sink for Slack's incoming webhooks: it refuses what Slack refuses and lists every message that it accepts.

A webhook's URL is a secret: the list and the log show only its first two parts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from aiohttp import web

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ..kit.emulator import PassiveEmulator
from ..kit.routing import Call, Route, mount
from ..kit.times import rfc3339
from .rules import Json, Refused, check_payload, parse_payload

SCHEMA = """
CREATE TABLE IF NOT EXISTS slack_messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, webhook TEXT NOT NULL, received REAL NOT NULL, payload TEXT NOT NULL);
"""
FAILURES = {429: "rate_limited", 500: "rollup_error", 503: "service_unavailable"}


class SlackSink(PassiveEmulator):
    """POST /slack/services/T/B/X is a webhook; GET /slack/messages lists the posted messages."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self.db = db
        self.clock = clock
        self._failures: list[int] = []
        db.connection.executescript(SCHEMA)

    def fail_next(self, count: int, status: int = 503) -> None:
        """Answer the next `count` posts with `status` and record nothing; 0 ends the outage."""
        self._failures = [status] * count

    def messages(self) -> list[Json]:
        """The posted messages, oldest first."""
        rows = self.db.rows("SELECT * FROM slack_messages ORDER BY id")
        return [
            {
                "id": row["id"],
                "webhook": row["webhook"],
                "time": rfc3339(row["received"]),
                "payload": json.loads(row["payload"]),
            }
            for row in rows
        ]

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return mount(
            [
                Route("POST", "/slack/services/{team}/{bot}/{secret}", self._post),
                Route("GET", "/slack/messages", lambda call: {"messages": self.messages()}),
                Route("POST", "/slack/_fail", self._fail),
            ]
        )

    def _post(self, call: Call) -> web.Response:
        if self._failures:
            status = self._failures.pop(0)
            headers = {"Retry-After": "1"} if status == 429 else None
            return web.Response(status=status, text=FAILURES.get(status, "error"), headers=headers)
        try:
            payload = parse_payload(call.body, call.headers.get("Content-Type", ""))
            check_payload(payload)
        except Refused as refused:
            return web.Response(status=refused.status, text=refused.word)
        webhook = f"{call.names['team']}/{call.names['bot']}"
        self.db.write(
            "INSERT INTO slack_messages (webhook, received, payload) VALUES (?, ?, ?)",
            (webhook, self.clock.now(), json.dumps(payload)),
        )
        return web.Response(text="ok")

    def _fail(self, call: Call) -> Json:
        body = call.json()
        count, status = body.get("count"), body.get("status", 503)
        if type(count) is not int or not 0 <= count <= 10_000 or type(status) is not int or not 400 <= status <= 599:
            raise ApiError("INVALID_ARGUMENT", f"count is {count!r}, status {status!r}; expected 0.. and 400 to 599")
        self.fail_next(count, status)
        return {}
