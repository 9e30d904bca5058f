"""Cloud Storage's JSON API: preconditions on every verb, generations, resumable uploads, events in the transaction."""

from .emulator import StorageEmulator
from .models import ObjectChange

__all__ = ["ObjectChange", "StorageEmulator"]
