"""What differs between machines and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GkeConfig:
    """Timings and quota of the emulated GKE; minutes in the cloud are seconds here."""

    create_seconds: float = 2.0
    delete_seconds: float = 1.0
    label_seconds: float = 0.0
    clusters_per_location: int = 15  # https://cloud.google.com/kubernetes-engine/quotas has 100; a laptop has not
    version: str = "1.33.5-gke.1080000"
