"""The smallest part of a spec that asks for each target: one line per target, and the shared tests run on it too."""

from __future__ import annotations

from typing import Any

PARTS: dict[str, dict[str, Any]] = {
    "cloud_run": {"placements": [{"region": "us-central1"}, {"region": "europe-west4"}]},
    "gke": {"placements": [{"region": "us-central1"}, {"region": "us-central1", "capacity": "spot"}]},
}
