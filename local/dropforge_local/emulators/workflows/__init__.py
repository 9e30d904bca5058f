"""The two APIs of Cloud Workflows."""

from .emulator import WorkflowsEmulator

__all__ = ["WorkflowsEmulator"]
