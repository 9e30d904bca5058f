"""Cloud Monitoring, for the requests to revisions of Cloud Run, and for the messages that wait in Pub/Sub."""

from .emulator import MonitoringEmulator

__all__ = ["MonitoringEmulator"]
