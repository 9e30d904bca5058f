"""The part of Cloud DNS that named endpoints on TPU VMs need: address records in one private zone."""

from .emulator import DnsEmulator

__all__ = ["DnsEmulator"]
