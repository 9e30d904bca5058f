"""What goes wrong on purpose at an emulated Google API: switches, and calls that fail next. Kept in the database."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from dropforge_local.base.db import Database
from dropforge_local.base.errors import HTTP_STATUS, ApiError

FAIL_NEXT = {"method", "status", "after_effect", "count", "delay_seconds", "message"}


class Switches:
    """One emulator's switches, in its own `table` of keys and values.

    `defaults` names them all, and says how they stand at first; the emulator acts at once upon what `actions` name.
    """

    def __init__(self, db: Database, table: str, defaults: Mapping[str, Any], actions: tuple[str, ...] = ()) -> None:
        self._db = db
        self._table = table
        self._defaults = {**defaults, "fail_next": []}
        self._actions = actions
        db.connection.execute(f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY, value TEXT NOT NULL)")

    def configure(self, body: Mapping[str, Any], methods: set[str]) -> dict[str, Any]:
        """Set the switches that `body` names and answer how all of them stand. Raises ApiError."""
        expected = {*self._defaults, *self._actions}
        if unknown := sorted(set(body) - expected):
            raise ApiError("INVALID_ARGUMENT", f"unknown faults {unknown!r}; expected {sorted(expected)!r}")
        values = {key: self.checked(key, value, methods) for key, value in body.items() if key in self._defaults}
        for key, value in values.items():
            self.set(key, value)
        return {key: self.get(key) for key in self._defaults}

    def checked(self, key: str, value: Any, methods: set[str]) -> Any:
        """The value that is kept for a switch. Raises ApiError for one that makes no sense."""
        if key != "fail_next":
            return value
        return [_checked_rule(rule, methods) for rule in (value if isinstance(value, list) else [value]) if rule]

    def get(self, key: str) -> Any:
        row = self._db.connection.execute(f"SELECT value FROM {self._table} WHERE key = ?", [key]).fetchone()
        return json.loads(row["value"]) if row else self._defaults[key]

    def set(self, key: str, value: Any) -> None:
        with self._db.transaction() as connection:
            connection.execute(f"INSERT OR REPLACE INTO {self._table} VALUES (?, ?)", [key, json.dumps(value)])

    async def call(self, method: str, work: Callable[[], Any]) -> Any:
        """What `work` returns, or awaits, as a call of `method` that suffers the fault it has to, before or after."""
        fault = self._take(method)
        await _suffer(fault, after_effect=False)
        answer = work()
        answer = await answer if inspect.isawaitable(answer) else answer
        await _suffer(fault, after_effect=True)
        return answer

    def _take(self, method: str) -> dict[str, Any] | None:
        """The fault that the next call of `method` has to suffer; each is used as often as its count says."""
        rules = self.get("fail_next")
        rule: dict[str, Any] | None = next((rule for rule in rules if rule["method"] == method), None)
        if rule is not None:
            rule["count"] -= 1
            self.set("fail_next", [other for other in rules if other["count"] > 0])
        return rule


class Faulty:
    """The methods of an API, each suffering the faults that are switched on."""

    def __init__(self, implementation: object, switches: Switches) -> None:
        self._implementation = implementation
        self._switches = switches

    def __getattr__(self, method: str) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        handler = getattr(self._implementation, method)

        async def call(request: Any) -> Any:
            return await self._switches.call(method, lambda: handler(request))

        return call


def parse_faults(data: bytes) -> dict[str, Any]:
    """The body of a request to set switches. Raises ApiError."""
    try:
        body = json.loads(data)
    except ValueError as error:
        raise ApiError("INVALID_ARGUMENT", f"the faults are not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError("INVALID_ARGUMENT", f"the faults are {body!r}; expected an object")
    return body


async def _suffer(rule: Mapping[str, Any] | None, *, after_effect: bool) -> None:
    """Delay and refuse as the rule says, if it is meant for this side of the effect."""
    if rule is None or bool(rule.get("after_effect")) is not after_effect:
        return
    await asyncio.sleep(rule.get("delay_seconds", 0))
    if status := rule.get("status"):
        raise ApiError(status, rule.get("message", f"{status} on purpose (faults of the local stack)"))


def _checked_rule(rule: Mapping[str, Any], methods: set[str]) -> dict[str, Any]:
    if unknown := sorted(set(rule) - FAIL_NEXT):
        raise ApiError("INVALID_ARGUMENT", f"unknown keys {unknown!r} in fail_next; expected {sorted(FAIL_NEXT)!r}")
    if rule.get("method") not in methods:
        raise ApiError("INVALID_ARGUMENT", f"fail_next.method is {rule.get('method')!r}; expected {sorted(methods)!r}")
    if rule.get("status", "UNAVAILABLE") not in HTTP_STATUS:
        raise ApiError("INVALID_ARGUMENT", f"fail_next.status is {rule['status']!r}; expected {sorted(HTTP_STATUS)!r}")
    refusal = {} if "delay_seconds" in rule else {"status": "UNAVAILABLE"}  # a call is at least slow
    return {"count": 1, **refusal, **rule}
