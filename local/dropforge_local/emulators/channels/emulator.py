"""A sink for the channels beside Slack: it refuses what the services refuse, and lists what they would take.

The paths of webhooks and the tokens are secrets: the list has none of them. GitHub has every repository except those of
the owner MISSING, and its tokens begin with TOKEN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from aiohttp import web

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from ..kit.emulator import PassiveEmulator
from ..kit.faults import failures
from ..kit.routing import Call, Route, mount
from ..kit.times import rfc3339
from .rules import Json, Refused, check_card, check_status, check_webhook

SCHEMA = """
CREATE TABLE IF NOT EXISTS channel_messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, channel TEXT NOT NULL, received REAL NOT NULL, headers TEXT NOT NULL,
    body TEXT NOT NULL);
"""
MISSING = "missing"
TOKEN = "github_pat_"
_KEPT_HEADERS = ("webhook-id", "webhook-timestamp", "webhook-signature", "content-type")


class ChannelSink(PassiveEmulator):
    """POST /channels/webhook/X, /channels/teams/X and /channels/github/repos/…/statuses/SHA; GET /channels/messages."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self.db = db
        self.clock = clock
        self._failures: list[int] = []
        db.connection.executescript(SCHEMA)

    def messages(self) -> list[Json]:
        """The messages of all channels, oldest first; the body is the text that was sent."""
        rows = self.db.rows("SELECT * FROM channel_messages ORDER BY id")
        return [
            {
                "id": row["id"],
                "channel": row["channel"],
                "time": rfc3339(row["received"]),
                "headers": json.loads(row["headers"]),
                "body": row["body"],
            }
            for row in rows
        ]

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return mount(
            [
                Route("POST", "/channels/webhook/{secret}", self._webhook),
                Route("POST", "/channels/teams/{secret}", self._teams),
                Route("POST", "/channels/github/repos/{owner}/{name}/statuses/{sha}", self._github),
                Route("GET", "/channels/messages", lambda call: {"messages": self.messages()}),
                Route("POST", "/channels/_fail", self._fail),
            ]
        )

    def _webhook(self, call: Call) -> web.Response:
        """A receiver that follows Standard Webhooks, but for the signature: it does not know the key."""
        return self._take("webhook", call, lambda: check_webhook(call.headers, call.body, self.clock.now()), 204)

    def _teams(self, call: Call) -> web.Response:
        return self._take("teams", call, lambda: check_card(call.body), 202)

    def _github(self, call: Call) -> web.Response:
        def check() -> None:
            if not call.headers.get("Authorization", "").startswith(f"Bearer {TOKEN}"):
                raise Refused(401, "Bad credentials")
            if call.names["owner"] == MISSING:
                raise Refused(404, "Not Found")
            check_status(call.headers, call.body, call.names["sha"])

        return self._take("github", call, check, 201)

    def _take(self, channel: str, call: Call, check: Callable[[], None], status: int) -> web.Response:
        if self._failures:
            return web.json_response({"message": "failed"}, status=self._failures.pop(0))
        try:
            check()
        except Refused as refused:
            return web.json_response({"message": refused.text}, status=refused.status)
        self.db.write(
            "INSERT INTO channel_messages (channel, received, headers, body) VALUES (?, ?, ?, ?)",
            (channel, self.clock.now(), json.dumps(_kept(call.headers)), call.body.decode()),
        )
        return web.Response(status=status)

    def _fail(self, call: Call) -> Json:
        """Answer the next `count` messages with `status`."""
        self._failures = failures(call)
        return {}


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _KEPT_HEADERS if name in headers}
