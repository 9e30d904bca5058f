"""GKE: Autopilot clusters, each with the Kubernetes API of the local stack."""

from .config import GkeConfig
from .emulator import GkeEmulator

__all__ = ["GkeConfig", "GkeEmulator"]
