"""Cloud Run's fault switches: stock-outs, quotas, and faults that end containers."""

from __future__ import annotations

from collections.abc import Collection

from dropforge_local.base.db import Database

from ..kit.faults import Switches
from .config import CloudRunConfig

ACTIONS = {"preempt": str, "out_of_memory": str}  # each names an execution, and happens at once


class Faults(Switches):
    """The fault switches of one emulator."""

    def __init__(self, db: Database, config: CloudRunConfig, methods: Collection[str] = ()) -> None:
        super().__init__(db, "cloudrun_settings", {"stockout": [], "quota": {}}, actions=ACTIONS, methods=methods)
        self._config = config

    def is_stocked_out(self, region: str) -> bool:
        return region in self.get("stockout")

    def gpu_quota(self, region: str, accelerator: str) -> int:
        """GPUs that one project may have in a region, of one type and kind of zonal redundancy."""
        quota = self.get("quota").get(region, self._config.gpu_quota)
        return int(quota.get(accelerator, self._config.gpu_quota) if isinstance(quota, dict) else quota)
