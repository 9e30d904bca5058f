"""The Cloud DNS API v1 over REST: rrsets.list, changes.create and changes.get in the one zone that Terraform makes.

A change takes effect at once, and is `pending` for a moment. Names resolve nowhere on a laptop: see forwarding.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError
from dropforge_local.base.ports import HOST, free_port
from dropforge_local.iam import require

from ..kit.access import guarded
from ..kit.emulator import PassiveEmulator
from ..kit.routing import Call, Reply, Route, mount
from ..kit.times import rfc3339
from . import rules
from .forwarding import Forwarder
from .permissions import ADDS, DELETES, NEEDS, UPDATES

Json = dict[str, Any]
SCHEMA = """
CREATE TABLE IF NOT EXISTS dns_records (name TEXT, type TEXT, body TEXT NOT NULL, PRIMARY KEY (name, type));
CREATE TABLE IF NOT EXISTS dns_changes (id INTEGER PRIMARY KEY, started REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS dns_ports (host TEXT, port INTEGER, local INTEGER NOT NULL, PRIMARY KEY (host, port));
"""
PORTS = range(20000, 20500)  # of the listeners that stand for names
PENDING_SECONDS = 0.3
MAX_RESULTS = 100


class DnsEmulator(PassiveEmulator):
    """The zone of `domain`, by its full name (projects/P/managedZones/Z). Satisfies server.Emulator."""

    tables = ("dns_records",)

    def __init__(self, db: Database, clock: Clock, zone: str, domain: str) -> None:
        self._db = db
        self._clock = clock
        self._domain = domain
        self._zone = zone
        self._forwarder = Forwarder(clock, self._resolve)
        db.connection.executescript(SCHEMA)

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        zone = "/dns/v1/{zone=projects/*/managedZones/*}"
        return mount([
            Route("GET", f"{zone}/rrsets", guarded(self._list, NEEDS["list_records"])),
            Route("POST", f"{zone}/changes", guarded(self._change, NEEDS["create_change"])),
            Route("GET", f"{zone}/changes/{{change}}", guarded(self._get, NEEDS["get_change"])),
            Route("GET", "/dns/_authority", self._authority),
        ])  # fmt: skip

    async def start(self) -> None:
        for row in self._db.rows("SELECT * FROM dns_ports", []):
            await self._forwarder.listen(row["local"], row["host"], row["port"])

    async def stop(self) -> None:
        await self._forwarder.stop()

    def live(self) -> list[str]:
        """The names of all records."""
        return [name for name, _ in self._records()]

    def _list(self, call: Call) -> Json:
        self._check_zone(call)
        name, kind = rules.read_filter(call.text("name"), call.text("type"))
        found = [
            {"kind": "dns#resourceRecordSet", **record}
            for key, record in sorted(self._records().items())
            if (not name or key[0] == name) and (not kind or key[1] == kind) and key[0] > call.text("pageToken")
        ]
        size = min(call.number("maxResults") or MAX_RESULTS, MAX_RESULTS)
        page: Json = {"kind": "dns#resourceRecordSetsListResponse", "rrsets": found[:size]}
        return {**page, "nextPageToken": found[size - 1]["name"]} if len(found) > size else page

    def _change(self, call: Call) -> Json | Reply:
        self._check_zone(call)
        deletions, additions = rules.read_change(call.json(), self._domain)
        removed, added = ({rules.key_of(each) for each in part} for part in (deletions, additions))
        for permission, keys in ((ADDS, added - removed), (DELETES, removed - added), (UPDATES, added & removed)):
            if keys:
                require(permission, call.names["zone"])
        try:
            with self._db.transaction():
                changed = rules.applied(self._records(), deletions, additions)
                self._db.write("DELETE FROM dns_records", [])
                for (name, kind), record in changed.items():
                    self._db.write("INSERT INTO dns_records VALUES (?, ?, ?)", [name, kind, json.dumps(record)])
                body = json.dumps({"additions": additions, "deletions": deletions})
                self._db.write("INSERT INTO dns_changes (started, body) VALUES (?, ?)", [self._clock.now(), body])
                row = self._db.row("SELECT * FROM dns_changes ORDER BY id DESC LIMIT 1", [])
        except rules.Lost as lost:
            return Reply(lost.answer, lost.status)
        return self._shown(row)

    def _get(self, call: Call) -> Json:
        self._check_zone(call)
        change = call.names["change"]
        row = self._db.row("SELECT * FROM dns_changes WHERE id = ?", [change])
        if row is None:
            raise ApiError("NOT_FOUND", f"The 'parameters.changeId' resource named '{change}' does not exist.")
        return self._shown(row)

    async def _authority(self, call: Call) -> Json:
        """Where clients on this machine reach a name: always at the same address, whatever the name's record says."""
        host, port = call.text("host"), call.number("port")
        row = self._db.row("SELECT local FROM dns_ports WHERE host = ? AND port = ?", [host, port])
        if row is None:
            taken = {known["local"] for known in self._db.rows("SELECT local FROM dns_ports", [])}
            self._db.write("INSERT INTO dns_ports VALUES (?, ?, ?)", [host, port, free_port(PORTS, taken)])
            row = self._db.row("SELECT local FROM dns_ports WHERE host = ? AND port = ?", [host, port])
        assert row is not None, "it was written"
        await self._forwarder.listen(row["local"], host, port)
        return {"authority": f"{HOST}:{row['local']}"}

    def _resolve(self, host: str) -> tuple[str, int] | None:
        record = self._records().get((f"{host}.", "A"))
        return None if record is None else (record["rrdatas"][0], record["ttl"])

    def _records(self) -> dict[rules.Key, Json]:
        rows = self._db.rows("SELECT * FROM dns_records", [])
        return {(row["name"], row["type"]): json.loads(row["body"]) for row in rows}

    def _shown(self, row: Any) -> Json:
        is_done = self._clock.now() >= row["started"] + PENDING_SECONDS
        return {
            "kind": "dns#change",
            "id": str(row["id"]),
            "startTime": rfc3339(row["started"]),
            "status": "done" if is_done else "pending",
            "isServing": is_done,
            **json.loads(row["body"]),
        }

    def _check_zone(self, call: Call) -> None:
        if (zone := call.names["zone"]) != self._zone:
            name = zone.rpartition("/")[2]
            raise ApiError("NOT_FOUND", f"The 'parameters.managedZone' resource named '{name}' does not exist.")
