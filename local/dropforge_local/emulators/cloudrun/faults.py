"""Cloud Run's fault switches: stock-outs, quotas, busy services, and faults that end containers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError

from ..kit.faults import Switches
from .config import CloudRunConfig

ACTIONS = {"preempt": str, "out_of_memory": str}  # each names an execution, and happens at once


class Faults(Switches):
    """The fault switches of one emulator."""

    def __init__(self, db: Database, config: CloudRunConfig, methods: Collection[str] = ()) -> None:
        switches = {"stockout": [], "quota": {}, "busy": 0}
        super().__init__(db, "cloudrun_settings", switches, actions=ACTIONS, methods=methods)
        self._config = config

    def checked(self, key: str, value: Any) -> Any:
        """The value to keep for a switch. Raises INVALID_ARGUMENT for a value that makes no sense."""
        if key == "busy" and (type(value) is not int or value < 0):
            raise ApiError("INVALID_ARGUMENT", f"busy is {value!r}; expected how many requests get 429")
        return super().checked(key, value)

    def take_busy(self) -> bool:
        """Whether the next request to a service finds every instance busy; each such request counts once."""
        if not (left := self.get("busy")):
            return False
        self.set("busy", left - 1)
        return True

    def is_stocked_out(self, region: str) -> bool:
        return region in self.get("stockout")

    def gpu_quota(self, region: str, accelerator: str) -> int:
        """GPUs that one project may have in a region, of one type and kind of zonal redundancy."""
        quota = self.get("quota").get(region, self._config.gpu_quota)
        return int(quota.get(accelerator, self._config.gpu_quota) if isinstance(quota, dict) else quota)
