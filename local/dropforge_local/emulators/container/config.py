"""Timings and quota that differ between machines and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GkeConfig:
    """Timings and quota of the emulated GKE. Steps that take minutes in the cloud take seconds here."""

    create_seconds: float = 2.0
    delete_seconds: float = 1.0
    label_seconds: float = 0.0
    # GKE allows 100, too many for a laptop: https://cloud.google.com/kubernetes-engine/quotas
    clusters_per_location: int = 15
    version: str = "1.33.5-gke.1080000"
