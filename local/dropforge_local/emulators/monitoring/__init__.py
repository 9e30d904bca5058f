"""Cloud Monitoring, for the metrics of the requests to revisions of Cloud Run."""

from .emulator import MonitoringEmulator

__all__ = ["MonitoringEmulator"]
