"""Compute Engine as far as TPU VMs need it: zonal persistent disks."""

from .config import ComputeConfig
from .emulator import ComputeEmulator

__all__ = ["ComputeConfig", "ComputeEmulator"]
