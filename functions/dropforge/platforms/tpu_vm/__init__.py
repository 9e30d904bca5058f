"""Platform `tpu_vm`."""

from __future__ import annotations

from dropforge.platforms.platform import Platform

from .spec import TpuVmServe, TpuVmTarget, TrainingVmServe

PLATFORM = Platform(
    name="tpu_vm",
    target=TpuVmTarget,
    serves=(
        TpuVmServe,
        TrainingVmServe,
    ),
)
