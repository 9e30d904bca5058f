"""Cloud Run's fault switches, besides calls that fail next: stock-outs and quotas."""

from __future__ import annotations

from dropforge_local.base.db import Database

from ..faults import Switches
from .config import CloudRunConfig


class Faults(Switches):
    """The fault switches of one emulator. `preempt` and `out_of_memory` name an execution, and act at once."""

    def __init__(self, db: Database, config: CloudRunConfig) -> None:
        super().__init__(db, "cloudrun_settings", {"stockout": [], "quota": {}}, ("preempt", "out_of_memory"))
        self._config = config

    def is_stocked_out(self, region: str) -> bool:
        return region in self.get("stockout")

    def gpu_quota(self, region: str, accelerator: str) -> int:
        """GPUs that one project may have in a region, of one type and kind of zonal redundancy."""
        given = self.get("quota").get(region, self._config.gpu_quota)
        return int(given.get(accelerator, self._config.gpu_quota) if isinstance(given, dict) else given)
