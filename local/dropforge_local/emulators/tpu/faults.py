"""What goes wrong on purpose: stock-outs, quotas, preemptions, lost and refused replies. Kept in the database."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ...errors import HTTP_STATUS, ApiError
from .store import Store

# Switches that stay; `preempt`, `reboot` and `maintenance` name a node and act at once.
DEFAULTS: dict[str, Any] = {"stockout": [], "quota": {}, "preempt_next": None, "fail_next": []}
ACTIONS = ("preempt", "reboot", "maintenance")
FAIL_NEXT = {"method", "status", "after_effect", "count", "delay_seconds", "message"}
PREEMPT_NEXT = {"count", "after_seconds"}


class Faults:
    """The fault switches of one emulator."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def configure(self, body: Mapping[str, Any], methods: set[str]) -> dict[str, Any]:
        """Set the switches that `body` names and answer how all of them stand."""
        if unknown := sorted(set(body) - set(DEFAULTS) - set(ACTIONS)):
            raise ApiError(
                "INVALID_ARGUMENT", f"unknown faults {unknown!r}; expected {sorted({*DEFAULTS, *ACTIONS})!r}"
            )
        values = {key: value for key, value in body.items() if key in DEFAULTS}
        if rules := values.get("fail_next"):
            values["fail_next"] = [_checked(rule, methods) for rule in (rules if isinstance(rules, list) else [rules])]
        if rule := values.get("preempt_next"):
            values["preempt_next"] = _checked_preemption(rule)
        for key, value in values.items():
            self._store.set_setting(key, value)
        return {key: self._store.setting(key, default) for key, default in DEFAULTS.items()}

    def is_stocked_out(self, zone: str) -> bool:
        return zone in self._store.setting("stockout", [])

    def quota(self, zone: str, default: int) -> int:
        """Chips of one generation and tier that a project may have in a zone."""
        return int(self._store.setting("quota", {}).get(zone, default))

    def take_preemption(self) -> float | None:
        """Seconds after which the machine that starts now is taken away; each rule is used as often as it says."""
        rule = self._store.setting("preempt_next", None)
        if rule is None:
            return None
        rule["count"] -= 1
        self._store.set_setting("preempt_next", rule if rule["count"] > 0 else None)
        return float(rule["after_seconds"])

    def take(self, method: str) -> dict[str, Any] | None:
        """The fault that the next call of `method` has to suffer."""
        rules = self._store.setting("fail_next", [])
        rule: dict[str, Any] | None = next((rule for rule in rules if rule["method"] == method), None)
        if rule is not None:
            rule["count"] -= 1
            self._store.set_setting("fail_next", [other for other in rules if other["count"] > 0])
        return rule


async def suffer(rule: Mapping[str, Any] | None, *, after_effect: bool) -> None:
    """Delay and refuse as the rule says, if it is meant for this side of the effect."""
    if rule is None or bool(rule.get("after_effect")) is not after_effect:
        return
    await asyncio.sleep(rule.get("delay_seconds", 0))
    if status := rule.get("status"):
        raise ApiError(status, rule.get("message", f"{status} on purpose (faults of the local stack)"))


def _checked(rule: Mapping[str, Any], methods: set[str]) -> dict[str, Any]:
    if unknown := sorted(set(rule) - FAIL_NEXT):
        raise ApiError("INVALID_ARGUMENT", f"unknown keys {unknown!r} in fail_next; expected {sorted(FAIL_NEXT)!r}")
    if rule.get("method") not in methods:
        raise ApiError("INVALID_ARGUMENT", f"fail_next.method is {rule.get('method')!r}; expected {sorted(methods)!r}")
    if rule.get("status", "UNAVAILABLE") not in HTTP_STATUS:
        raise ApiError("INVALID_ARGUMENT", f"fail_next.status is {rule['status']!r}; expected {sorted(HTTP_STATUS)!r}")
    return {"count": 1, **rule}


def _checked_preemption(rule: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(rule) - PREEMPT_NEXT):
        raise ApiError(
            "INVALID_ARGUMENT", f"unknown keys {unknown!r} in preempt_next; expected {sorted(PREEMPT_NEXT)!r}"
        )
    return {"count": 1, "after_seconds": 0, **rule}
