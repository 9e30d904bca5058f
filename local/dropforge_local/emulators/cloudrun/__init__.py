"""Cloud Run: jobs and services of containers that are local process groups."""

from .config import CloudRunConfig
from .emulator import CloudRunEmulator

__all__ = ["CloudRunConfig", "CloudRunEmulator"]
