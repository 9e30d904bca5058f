"""Pub/Sub: gRPC and REST from one state in SQLite, with real leases, retries, ordering, filters and dead letters."""

from .emulator import PubSubEmulator
from .faults import DeliveryFaults

__all__ = ["DeliveryFaults", "PubSubEmulator"]
