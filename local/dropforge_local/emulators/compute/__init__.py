"""The part of Compute Engine that TPU VMs need: zonal persistent disks."""

from .config import ComputeConfig
from .emulator import ComputeEmulator

__all__ = ["ComputeConfig", "ComputeEmulator"]
