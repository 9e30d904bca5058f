"""Cloud Monitoring, as far as it tells what the revisions of Cloud Run have answered."""

from .emulator import MonitoringEmulator

__all__ = ["MonitoringEmulator"]
