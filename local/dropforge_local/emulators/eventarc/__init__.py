"""Eventarc: CloudEvents for storage changes and published messages."""

from .emulator import ACK_DEADLINE_SECONDS, EventarcRouter
from .rules import Trigger

__all__ = ["ACK_DEADLINE_SECONDS", "EventarcRouter", "Trigger"]
