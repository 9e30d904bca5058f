"""What goes wrong on purpose: stock-outs, quotas, slow and ambiguous replies. Kept in the database."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ...errors import HTTP_STATUS, ApiError
from .config import CloudRunConfig
from .store import Store

SWITCHES = {"stockout", "quota", "preempt", "fail_next"}
FAIL_NEXT = {"method", "status", "after_effect", "count", "delay_seconds", "message"}


class Faults:
    """The fault switches of one emulator."""

    def __init__(self, store: Store, config: CloudRunConfig) -> None:
        self._store = store
        self._config = config

    def configure(self, body: Mapping[str, Any], methods: set[str]) -> dict[str, Any]:
        """Set the switches that `body` names and answer how all of them stand."""
        if unknown := sorted(set(body) - SWITCHES):
            raise ApiError("INVALID_ARGUMENT", f"unknown faults {unknown!r}; expected {sorted(SWITCHES)!r}")
        if "stockout" in body:
            self._store.set_setting("stockout", sorted(body["stockout"]))
        if "quota" in body:
            self._store.set_setting("quota", body["quota"])
        if "fail_next" in body:
            rules = body["fail_next"] if isinstance(body["fail_next"], list) else [body["fail_next"]]
            self._store.set_setting("fail_next", [_checked(rule, methods) for rule in rules if rule])
        return {key: self._store.setting(key, default) for key, default in _DEFAULTS.items()}

    def is_stocked_out(self, region: str) -> bool:
        return region in self._store.setting("stockout", [])

    def gpu_quota(self, region: str, accelerator: str) -> int:
        """GPUs that one project may have in a region, of one type and kind of zonal redundancy."""
        given = self._store.setting("quota", {}).get(region, self._config.gpu_quota)
        return int(given.get(accelerator, self._config.gpu_quota) if isinstance(given, dict) else given)

    def take(self, method: str) -> dict[str, Any] | None:
        """The fault that the next call of `method` has to suffer; each is used as often as its count says."""
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


_DEFAULTS: dict[str, Any] = {"stockout": [], "quota": {}, "fail_next": []}


def _checked(rule: Mapping[str, Any], methods: set[str]) -> dict[str, Any]:
    if unknown := sorted(set(rule) - FAIL_NEXT):
        raise ApiError("INVALID_ARGUMENT", f"unknown keys {unknown!r} in fail_next; expected {sorted(FAIL_NEXT)!r}")
    if rule.get("method") not in methods:
        raise ApiError("INVALID_ARGUMENT", f"fail_next.method is {rule.get('method')!r}; expected {sorted(methods)!r}")
    if rule.get("status", "UNAVAILABLE") not in HTTP_STATUS:
        raise ApiError("INVALID_ARGUMENT", f"fail_next.status is {rule['status']!r}; expected {sorted(HTTP_STATUS)!r}")
    return {"count": 1, **rule}
