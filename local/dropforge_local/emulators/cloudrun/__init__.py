"""Cloud Run: jobs and services whose containers are local process groups."""

from .config import CloudRunConfig
from .emulator import CloudRunEmulator

__all__ = ["CloudRunConfig", "CloudRunEmulator"]
