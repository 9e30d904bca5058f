"""The smallest `target` and `serve` of a spec for each platform.

The shared tests run on every target and endpoint in these tables.
"""

from __future__ import annotations

from typing import Any

PARTS: dict[str, dict[str, Any]] = {
    "cloud_run": {"placements": [{"region": "us-central1"}, {"region": "europe-west4"}]},
    "gke": {"placements": [{"region": "us-central1"}, {"region": "us-central1", "capacity": "spot"}]},
    "ray": {
        "accelerator": "tpu-v5p-slice",
        "topology": "2x2x2",
        "head_cpu": 1,
        "head_memory_gib": 1,
        "head_storage_gib": 10,
        "placements": [{"region": "us-central1"}, {"region": "us-central1", "capacity": "spot"}],
    },
    "tpu_vm": {"placements": [{"zone": "us-west1-c", "capacity": "spot"}, {"zone": "us-west4-a"}]},
}
SERVES: dict[str, dict[str, Any]] = {
    "cloud_run": {"ttl": "1h"},
    "gke": {"ttl": "1h", "region": "us-central1", "max_instances": 2},
    "tpu_vm": {"ttl": "1h", "zone": "us-west4-a", "capacity": "spot"},
}
