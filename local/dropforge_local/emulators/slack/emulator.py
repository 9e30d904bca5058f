"""A sink for Slack's webhooks and for chat.postMessage: it refuses what Slack refuses, and lists what it takes.

A webhook's URL is a secret: the list and the log show only its first two parts. The workspace has the channel CHANNEL,
and a bot's token is valid if it begins with TOKEN.
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
CHANNEL = "C0LOCAL000"
TOKEN = "xoxb-"
BOT = "bot"


class SlackSink(PassiveEmulator):
    """POST /slack/services/T/B/X is a webhook, POST /slack/api/chat.postMessage is for bots; GET /slack/messages lists.

    GET /slack/messages?containing=TEXT lists only the messages with a text, such as the id of a run.
    A bot's message is listed with the webhook "bot". Its `ts` is its id in Slack's form.
    """

    def __init__(self, db: Database, clock: Clock) -> None:
        self.db = db
        self.clock = clock
        self._failures: list[int] = []
        db.connection.executescript(SCHEMA)

    def fail_next(self, count: int, status: int = 503) -> None:
        """Answer the next `count` posts with `status` and record nothing; 0 ends the outage."""
        self._failures = [status] * count

    def messages(self, text: str = "") -> list[Json]:
        """The posted messages that contain a text of ASCII, oldest first."""
        rows = self.db.rows("SELECT * FROM slack_messages WHERE instr(payload, ?) ORDER BY id", [text])
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
                Route("POST", "/slack/api/chat.postMessage", self._post_as_bot),
                Route("GET", "/slack/messages", lambda call: {"messages": self.messages(call.text("containing"))}),
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
        self._keep(f"{call.names['team']}/{call.names['bot']}", payload)
        return web.Response(text="ok")

    def _post_as_bot(self, call: Call) -> web.Response:
        """https://docs.slack.dev/reference/methods/chat.postMessage: most refusals have the status 200."""
        if self._failures:
            status = self._failures.pop(0)
            headers = {"Retry-After": "1"} if status == 429 else None
            word = {429: "ratelimited"}.get(status, "internal_error")
            return web.json_response({"ok": False, "error": word}, status=status, headers=headers)
        try:
            payload = self._bot_payload(call)
        except Refused as refused:
            return web.json_response({"ok": False, "error": refused.word})
        ts = _ts(self._keep(BOT, payload))
        return web.json_response({"ok": True, "channel": payload["channel"], "ts": ts, "message": payload})

    def _bot_payload(self, call: Call) -> Json:
        """The message in a bot's call. Raises Refused."""
        _, _, token = call.headers.get("Authorization", "").partition("Bearer ")
        if not token.startswith(TOKEN):
            raise Refused("invalid_auth" if token else "not_authed")
        payload = parse_payload(call.body, call.headers.get("Content-Type", ""))
        if payload.get("channel") != CHANNEL:
            raise Refused("channel_not_found")
        check_payload(payload)
        if "thread_ts" in payload and payload["thread_ts"] not in self._first_messages():
            raise Refused("thread_not_found")
        return payload

    def _first_messages(self) -> list[str]:
        """The `ts` of every message of bots that is no reply."""
        rows = self.db.rows("SELECT id, payload FROM slack_messages WHERE webhook = ?", (BOT,))
        return [_ts(row["id"]) for row in rows if "thread_ts" not in json.loads(row["payload"])]

    def _keep(self, webhook: str, payload: Json) -> int:
        """Keep a message; return its id."""
        self.db.write(
            "INSERT INTO slack_messages (webhook, received, payload) VALUES (?, ?, ?)",
            (webhook, self.clock.now(), json.dumps(payload)),
        )
        return int(self.db.rows("SELECT max(id) AS id FROM slack_messages")[0]["id"])

    def _fail(self, call: Call) -> Json:
        body = call.json()
        count, status = body.get("count"), body.get("status", 503)
        if type(count) is not int or not 0 <= count <= 10_000 or type(status) is not int or not 400 <= status <= 599:
            raise ApiError("INVALID_ARGUMENT", f"count is {count!r}, status {status!r}; expected 0.. and 400 to 599")
        self.fail_next(count, status)
        return {}


def _ts(number: int) -> str:
    return f"1700000000.{number:06d}"
