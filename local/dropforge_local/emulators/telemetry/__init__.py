"""Google Cloud's Telemetry API, as far as it takes traces."""

from .emulator import TelemetryEmulator

__all__ = ["TelemetryEmulator"]
