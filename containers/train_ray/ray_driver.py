"""What a RayJob runs on the head of its cluster: containers/train_maxtext's driver, with training on the workers.

    DROPFORGE_TPU_ACCELERATOR=tpu-v6e-slice DROPFORGE_TPU_TOPOLOGY=4x4 DROPFORGE_TPU_HOSTS=4 python ray_driver.py

The other variables, the events, exit codes, stages and artifacts are those of containers/train_maxtext.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import driver
import stages


class Watch(driver.Watch):
    """Tells of the steps. The workers' checkpoints are in the bucket already; what the head has is only the weights."""

    def _tell(self, told: dict[str, Any]) -> None:
        if "loss" not in told:
            self._meter = None  # the workers begin, or begin again after one was lost
        super()._tell(told)

    def _steps(self) -> list[int]:
        return []


stages.TRAIN_SCRIPTS["sft"] = "ray_train.py"
driver.Watch = Watch  # type: ignore[misc]

if __name__ == "__main__":
    code = driver.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
