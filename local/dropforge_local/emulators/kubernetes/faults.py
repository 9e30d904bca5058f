"""Faults on purpose: stock-outs, quotas, refused and slow API calls. The database keeps the switches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from .kinds import KINDS
from .refusals import REASONS, Refusal

SWITCHES = {"stockout", "quota", "fail_next", "preempt", "evict"}
RULE = {"cluster", "verb", "resource", "code", "count", "after_effect", "delay_seconds", "retry_after", "message"}
VERBS = {"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "log", "proxy", "*"}
_DEFAULTS: dict[str, Any] = {"stockout": [], "quota": {}, "fail_next": []}


class Faults:
    """The switches of all clusters: `stockout` names accelerators, `quota` limits them, `fail_next` fails API calls."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def configure(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Set the switches that `body` names; return all switches."""
        if unknown := sorted(set(body) - SWITCHES):
            raise ApiError("INVALID_ARGUMENT", f"unknown faults {unknown!r}; expected {sorted(SWITCHES)!r}")
        for switch, shape in (("stockout", list), ("quota", dict), ("preempt", dict), ("evict", dict)):
            if not isinstance(body.get(switch, shape()), shape):
                raise ApiError("INVALID_ARGUMENT", f"{switch} is {body[switch]!r}; expected a {shape.__name__}")
        for switch in ("stockout", "quota"):
            if switch in body:
                self._set(switch, body[switch])
        if "fail_next" in body:
            rules = body["fail_next"] if isinstance(body["fail_next"], list) else [body["fail_next"]]
            self._set("fail_next", [_checked(rule) for rule in rules if rule])
        return {key: self._get(key) for key in _DEFAULTS}

    def is_stocked_out(self, accelerator: str) -> bool:
        return accelerator in self._get("stockout")

    def quota(self, accelerator: str) -> int | None:
        """The quota of a cluster for the accelerator; None without a quota."""
        value = self._get("quota").get(accelerator)
        return None if value is None else int(value)

    def take(self, cluster: str, verb: str, resource: str) -> dict[str, Any] | None:
        """The fault for this call, or None. Each fault applies as often as its count says."""
        rules = self._get("fail_next")
        for rule in rules:
            if rule["verb"] in (verb, "*") and rule["resource"] in (resource, "*") and rule["cluster"] in cluster:
                rule["count"] -= 1
                self._set("fail_next", [other for other in rules if other["count"] > 0])
                return dict(rule)
        return None

    def _get(self, key: str) -> Any:
        row = self._db.connection.execute("SELECT value FROM kubernetes_settings WHERE key = ?", [key]).fetchone()
        return json.loads(row["value"]) if row else _DEFAULTS[key]

    def _set(self, key: str, value: Any) -> None:
        with self._db.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO kubernetes_settings VALUES (?, ?)", [key, json.dumps(value)])


async def suffer(rule: Mapping[str, Any] | None, *, after_effect: bool) -> None:
    """Delay and refuse by the rule, if it applies before (or with `after_effect`, after) the call's effect."""
    if rule is None or bool(rule.get("after_effect")) is not after_effect:
        return
    await asyncio.sleep(rule.get("delay_seconds", 0))
    if code := rule.get("code"):
        headers = {"Retry-After": str(rule["retry_after"])} if "retry_after" in rule else {}
        message = rule.get("message", f"{code} on purpose (faults of the local stack)")
        raise Refusal(code, message, reason=REASONS.get(code, "Unknown"), headers=headers)


def _checked(rule: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(rule) - RULE):
        raise ApiError("INVALID_ARGUMENT", f"unknown keys {unknown!r} in fail_next; expected {sorted(RULE)!r}")
    resources = {kind.plural for kind in KINDS} | {"*"}
    if rule.get("verb", "*") not in VERBS:
        raise ApiError("INVALID_ARGUMENT", f"fail_next.verb is {rule['verb']!r}; expected {sorted(VERBS)!r}")
    if rule.get("resource", "*") not in resources:
        raise ApiError(
            "INVALID_ARGUMENT", f"fail_next.resource is {rule['resource']!r}; expected {sorted(resources)!r}"
        )
    if "code" in rule and (not isinstance(rule["code"], int) or not 400 <= rule["code"] < 600):
        raise ApiError("INVALID_ARGUMENT", f"fail_next.code is {rule['code']!r}; expected an HTTP error's number")
    return {"cluster": "", "verb": "*", "resource": "*", "count": 1, **rule}
