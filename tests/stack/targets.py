"""The smallest parts of a spec that ask for each target and each endpoint: one line, and the shared tests run on it."""

from __future__ import annotations

from typing import Any

PARTS: dict[str, dict[str, Any]] = {
    "cloud_run": {"placements": [{"region": "us-central1"}, {"region": "europe-west4"}]},
    "gke": {"placements": [{"region": "us-central1"}, {"region": "us-central1", "capacity": "spot"}]},
}
SERVES: dict[str, dict[str, Any]] = {
    "cloud_run": {"ttl": "1h"},
    "gke": {"ttl": "1h", "region": "us-central1", "max_instances": 2},
}

# Kinds whose API the stack has not got, by the variable that will say where it is: then they get their lines above.
ABSENT = {"tpu_vm": "TPU_EMULATOR_HOST"}
