"""The slice of TPU hosts that this run has, from the environment, as Ray Train wants it described."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from job import config_error

# Ray's names of the generations (ray.util.tpu), by GKE's label.
GENERATIONS = {
    "tpu-v4-podslice": "TPU-V4",
    "tpu-v5-lite-podslice": "TPU-V5LITEPOD",
    "tpu-v5p-slice": "TPU-V5P",
    "tpu-v6e-slice": "TPU-V6E",
    "tpu7x": "TPU-V7X",
}


@dataclass(frozen=True)
class Slice:
    """One worker for each host; `chips` are a host's."""

    accelerator: str
    topology: str
    hosts: int
    chips: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Slice:
        """Raises JobError naming what is missing or malformed."""
        accelerator = environ.get("DROPFORGE_TPU_ACCELERATOR", "")
        topology = environ.get("DROPFORGE_TPU_TOPOLOGY", "")
        counts = [environ.get(name, "") for name in ("DROPFORGE_TPU_HOSTS", "DROPFORGE_TPU_CHIPS_PER_HOST")]
        if accelerator not in GENERATIONS or not topology or not all(one.isdecimal() and int(one) for one in counts):
            raise config_error(
                f"DROPFORGE_TPU_ACCELERATOR, _TOPOLOGY, _HOSTS and _CHIPS_PER_HOST are {accelerator!r}, {topology!r}, "
                f"{counts[0]!r}, {counts[1]!r}; expected one of {', '.join(GENERATIONS)}, a topology, two numbers",
                "the control plane sets these variables",
            )
        return cls(accelerator, topology, int(counts[0]), int(counts[1]))

    def scaling(self, *, tpu: bool) -> dict[str, Any]:
        """Arguments of ScalingConfig. Without TPUs, the same workers in the same places, on the CPU."""
        if tpu:
            kind = GENERATIONS[self.accelerator]
            return {
                "use_tpu": True,
                "num_workers": self.hosts,
                "topology": self.topology,
                "accelerator_type": kind,
                "resources_per_worker": {"TPU": self.chips},
            }
        return {
            "num_workers": self.hosts,
            "resources_per_worker": {"CPU": 1},  # Ray refuses TPU here; the head has no CPUs for workers
            "placement_strategy": "STRICT_SPREAD",
        }
