"""Faults on purpose at an emulated API: switches, and rules for the next calls. The database keeps them."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from dropforge_local.base.db import Database
from dropforge_local.base.errors import HTTP_STATUS, ApiError

from .routing import Call, Handler, Route
from .rpc import Method, snake_case

Rule = dict[str, Any]


def failures(call: Call) -> list[int]:
    """The HTTP statuses of the next answers that a call asks for: `count` times `status` (503). Raises ApiError."""
    body = call.json()
    count, status = body.get("count"), body.get("status", 503)
    if type(count) is not int or not 0 <= count <= 10_000 or type(status) is not int or not 300 <= status <= 599:
        raise ApiError("INVALID_ARGUMENT", f"count is {count!r}, status {status!r}; expected 0.. and 300 to 599")
    return [status] * count


class Switches:
    """One emulator's switches, in its own `table` of keys and values.

    `defaults` has every switch with its initial value; a list stays a list, an object stays an object. `actions` has
    the type of each switch that the emulator carries out at once instead of keeping it. The switch `fail_next` has
    rules: each refuses or delays `count` calls of a method, before or after the effect of the call.
    """

    # The keys of a rule. A subclass may select calls in another way: it overrides RULE, checked_rule and refusal.
    RULE = frozenset(("method", "status", "after_effect", "count", "delay_seconds", "message"))

    def __init__(
        self,
        db: Database,
        table: str,
        defaults: Mapping[str, Any],
        *,
        actions: Mapping[str, type] = MappingProxyType({}),
        methods: Collection[str] = (),
    ) -> None:
        self._db = db
        self._table = table
        self._defaults = {**defaults, "fail_next": []}
        self._actions = actions
        self._methods = methods
        db.connection.execute(f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY, value TEXT NOT NULL)")

    def configure(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Set the switches that `body` names; return the values of all switches. Raises INVALID_ARGUMENT."""
        _refuse_unknown("faults", body, {*self._defaults, *self._actions})
        for key, shape in self._actions.items():
            _check_shape(key, body.get(key, shape()), shape)
        values = {key: self.checked(key, value) for key, value in body.items() if key in self._defaults}
        for key, value in values.items():
            self.set(key, value)
        return {key: self.get(key) for key in self._defaults}

    def checked(self, key: str, value: Any) -> Any:
        """The value to keep for a switch. Raises INVALID_ARGUMENT for a value that makes no sense."""
        if key == "fail_next":
            rules = value if isinstance(value, list) else [value]
            return [self._checked_common(rule) for rule in rules if rule]
        if isinstance(self._defaults[key], (list, dict)):
            _check_shape(key, value, type(self._defaults[key]))
        return value

    def checked_rule(self, rule: Rule) -> Rule:
        """The rule to keep in `fail_next`; its keys are known. Raises INVALID_ARGUMENT."""
        check_choice("method", rule.get("method"), self._methods)
        check_choice("status", rule.get("status", "UNAVAILABLE"), HTTP_STATUS)
        refusal = {} if "delay_seconds" in rule else {"status": "UNAVAILABLE"}  # every rule refuses or delays
        return {**refusal, **rule}

    def refusal(self, rule: Rule) -> Exception | None:
        """The error that the call receives; None for a rule that only delays."""
        if status := rule.get("status"):
            return ApiError(status, rule.get("message", f"{status} on purpose (faults of the local stack)"))
        return None

    def get(self, key: str) -> Any:
        row = self._db.row(f"SELECT value FROM {self._table} WHERE key = ?", [key])
        return json.loads(row["value"]) if row else self._defaults[key]

    def set(self, key: str, value: Any) -> None:
        self._db.write(f"INSERT OR REPLACE INTO {self._table} VALUES (?, ?)", [key, json.dumps(value)])

    def take(self, is_meant: Callable[[Rule], bool]) -> Rule | None:
        """The first rule that is meant for this call, counted down; None without such a rule."""
        rules = self.get("fail_next")
        rule: Rule | None = next(filter(is_meant, rules), None)
        if rule is not None:
            rule["count"] -= 1
            self.set("fail_next", [other for other in rules if other["count"] > 0])
        return rule

    async def suffer(self, rule: Rule | None, *, after_effect: bool) -> None:
        """Delay the call and raise its refusal if the rule is for this side of the effect."""
        if rule is None or bool(rule.get("after_effect")) is not after_effect:
            return
        await asyncio.sleep(rule.get("delay_seconds", 0))
        if (error := self.refusal(rule)) is not None:
            raise error

    async def call(self, method: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, awaited where it is a coroutine, as a call of `method` with the faults of its rule."""
        rule = self.take(lambda rule: bool(rule["method"] == method))
        await self.suffer(rule, after_effect=False)
        answer = work()
        answer = await answer if inspect.isawaitable(answer) else answer
        await self.suffer(rule, after_effect=True)
        return answer

    def wrap(self, method: str, handler: Handler) -> Handler:
        """The handler of a route, as a call of `method`."""

        async def serve(call: Call) -> Any:
            return await self.call(method, lambda: handler(call))

        return serve

    def route(self, api: str, act: Callable[[Mapping[str, Any]], None] = lambda body: None) -> Route:
        """POST /_local/API/faults, which sets the switches, then calls `act` with the body, and answers all values."""

        def serve(call: Call) -> dict[str, Any]:
            body = call.json()
            values = self.configure(body)
            act(body)
            return values

        return Route("POST", f"/_local/{api}/faults", serve)

    def _checked_common(self, rule: Rule) -> Rule:
        _refuse_unknown("keys in fail_next", rule, self.RULE)
        return {"count": 1, **self.checked_rule(rule)}


class Faulty:
    """The methods of an API, each with the faults that are switched on."""

    def __init__(self, implementation: object, switches: Switches) -> None:
        self._implementation = implementation
        self._switches = switches

    def __getattr__(self, method: str) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        handler = getattr(self._implementation, method)

        async def call(request: Any) -> Any:
            return await self._switches.call(method, lambda: handler(request))

        return call


def names_of(methods: Iterable[Method]) -> set[str]:
    """The methods' names in `fail_next`."""
    return {snake_case(method.name) for method in methods}


def _refuse_unknown(kind: str, given: Mapping[str, Any], expected: Collection[str]) -> None:
    if unknown := sorted(set(given) - set(expected)):
        raise ApiError("INVALID_ARGUMENT", f"unknown {kind} {unknown!r}; expected {sorted(expected)!r}")


def _check_shape(key: str, value: Any, shape: type) -> None:
    if not isinstance(value, shape):
        raise ApiError("INVALID_ARGUMENT", f"{key} is {value!r}; expected a {shape.__name__}")


def check_choice(key: str, value: Any, choices: Collection[str]) -> None:
    """Raise INVALID_ARGUMENT unless a key of a rule has one of the choices."""
    if value not in choices:
        raise ApiError("INVALID_ARGUMENT", f"fail_next.{key} is {value!r}; expected {sorted(choices)!r}")
