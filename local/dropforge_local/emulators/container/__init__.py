"""GKE: Autopilot clusters whose Kubernetes API is the local one."""

from .config import GkeConfig
from .emulator import GkeEmulator

__all__ = ["GkeConfig", "GkeEmulator"]
