"""Cloud DNS behind a session of `requests`: the records of one private zone.

The rules of the emulator decide what is refused. A change takes effect when it is executed, and is `pending` then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import requests

from dropforge_local.base.errors import ApiError
from dropforge_local.emulators.dns import rules

from .world import World, broken

ROOT = "https://dns.chaos/dns/v1"
PAGE = 2  # record sets on a page, so that lists have several
Answer = tuple[int, rules.Json]


class Dns:
    """The zone and its client. `changed` is called with each name whose address has changed, and the address or ""."""

    def __init__(self, world: World, zone: str, domain: str) -> None:
        self.world = world
        self.records: dict[rules.Key, rules.Json] = {}
        self.changed: Callable[[str, str], None] = lambda name, address: None
        self._zone = zone
        self._domain = domain
        self._changes: list[float] = []  # when each is done

    def clients(self) -> dict[str, Callable[..., Any]]:
        """By the names of clients.py."""
        return {"dns": lambda: (self, ROOT), "authority_of": lambda host, port: f"{host}:{port}"}

    def address(self, name: str) -> str:
        """The address of a name; "" without one."""
        record = self.records.get((name, "A"))
        return str(record["rrdatas"][0]) if record else ""

    def request(self, verb: str, url: str, params: Mapping[str, str] | None, json: Any, timeout: float) -> Any:
        """One request of `requests.Session`."""
        zone, _, path = url.removeprefix(f"{ROOT}/").partition(f"{self._zone}/")
        assert not zone, f"{url} is not in the zone {self._zone}"

        def answer() -> requests.Response:
            try:
                status, body = self._answer(verb, path, dict(params or {}), json)
            except ApiError as error:
                status, body = error.http_status, error.to_json()
            return _response(verb, url, status, body)

        name = f"dns.{verb.lower()} {path.partition('/')[0]}"
        return self.world.effect(name, answer, changes=verb == "POST", error=broken)

    def by_hand(self, name: str, address: str) -> None:
        """Somebody gives a name another address, or none ("")."""
        read = self.records.get((name, "A"))
        wanted = {"name": name, "type": "A", "ttl": 300, "rrdatas": [address]}
        self._apply([read] if read else [], [wanted] if address else [])

    def _answer(self, verb: str, path: str, query: Mapping[str, str], body: Any) -> Answer:
        kind, _, number = path.partition("/")
        if (verb, kind) == ("POST", "changes"):
            try:
                self._apply(*rules.read_change(body, self._domain))
            except rules.Lost as lost:
                return lost.status, lost.answer
            faults = self.world.faults
            self._changes.append(self.world.now + self.world.duration(faults.slow_start, (5, 120), (0.2, 3)))
            number = str(len(self._changes))
        if kind == "changes":
            is_done = self._changes[int(number) - 1] <= self.world.now
            return 200, {"id": number, "status": "done" if is_done else "pending"}
        return 200, self._list(query)

    def _list(self, query: Mapping[str, str]) -> rules.Json:
        name, kind = rules.read_filter(query.get("name", ""), query.get("type", ""))
        after = query.get("pageToken", "")
        found = [
            (key, record)
            for key, record in sorted(self.records.items())
            if (not name or key[0] == name) and (not kind or key[1] == kind) and " ".join(key) > after
        ]
        page: rules.Json = {"rrsets": [{"kind": "dns#resourceRecordSet", **record} for _, record in found[:PAGE]]}
        return {**page, "nextPageToken": " ".join(found[PAGE - 1][0])} if len(found) > PAGE else page

    def _apply(self, deletions: list[rules.Json], additions: list[rules.Json]) -> None:
        names = {record["name"] for record in (*deletions, *additions)}
        before = {name: self.address(name) for name in names}
        self.records = rules.applied(self.records, deletions, additions)
        for name in sorted(names):
            if (address := self.address(name)) != before[name]:
                self.changed(name, address)


def _response(verb: str, url: str, status: int, body: rules.Json) -> requests.Response:
    response = requests.Response()
    response.status_code = status
    response._content = json.dumps(body).encode()  # the library has no other way to make an answer
    response.request = SimpleNamespace(method=verb, url=url)  # type: ignore[assignment]  # that is all that its errors read
    return response
