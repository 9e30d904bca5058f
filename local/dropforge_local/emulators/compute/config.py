"""Timings and quota that differ between projects and machines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Timings and quota of the emulated Compute Engine."""

    create_seconds: float = 0.2
    delete_seconds: float = 0.2
    disk_gb_per_zone: int = 4096
