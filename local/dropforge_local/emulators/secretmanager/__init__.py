"""Secret Manager."""

from .emulator import SecretManagerEmulator

__all__ = ["SecretManagerEmulator"]
