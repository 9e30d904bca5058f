"""Cloud TPU's fault switches: stock-outs, quotas, and faults that take machines away or damage them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ..kit.faults import Switches

# Each names a node, and happens at once.
ACTIONS = {"preempt": str, "reboot": str, "maintenance": str, "out_of_memory": str}
PREEMPT_NEXT = {"count", "after_seconds"}


class Faults(Switches):
    """The fault switches of one emulator."""

    def __init__(self, db: Database, methods: Collection[str]) -> None:
        defaults: dict[str, Any] = {"stockout": [], "quota": {}, "preempt_next": None}
        super().__init__(db, "tpu_settings", defaults, actions=ACTIONS, methods=methods)

    def checked(self, key: str, value: Any) -> Any:
        if key == "preempt_next" and value:
            return _checked_preemption(value)
        return super().checked(key, value)

    def is_stocked_out(self, zone: str) -> bool:
        return zone in self.get("stockout")

    def quota(self, zone: str, default: int) -> int:
        """Chips of one generation and tier that a project may have in a zone."""
        return int(self.get("quota").get(zone, default))

    def take_preemption(self) -> float | None:
        """Seconds until the preemption of the machine that starts now, counted down; None without a rule."""
        rule = self.get("preempt_next")
        if rule is None:
            return None
        rule["count"] -= 1
        self.set("preempt_next", rule if rule["count"] > 0 else None)
        return float(rule["after_seconds"])


def _checked_preemption(rule: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(rule) - PREEMPT_NEXT):
        raise ApiError(
            "INVALID_ARGUMENT", f"unknown keys {unknown!r} in preempt_next; expected {sorted(PREEMPT_NEXT)!r}"
        )
    return {"count": 1, "after_seconds": 0, **rule}
