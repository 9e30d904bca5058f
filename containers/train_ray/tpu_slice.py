"""The run's slice of TPU hosts: read from the environment, described for Ray Train."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from containers.common.errors import config_error

# Ray's names of the TPU generations (ray.util.tpu), by GKE's label.
GENERATIONS = {
    "tpu-v4-podslice": "TPU-V4",
    "tpu-v5-lite-podslice": "TPU-V5LITEPOD",
    "tpu-v5p-slice": "TPU-V5P",
    "tpu-v6e-slice": "TPU-V6E",
    "tpu7x": "TPU-V7X",
}


@dataclass(frozen=True)
class Slice:
    """The slice has one worker per host; `chips` counts the chips of a host."""

    accelerator: str
    topology: str
    hosts: int
    chips: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Slice:
        """Raises JobError if a variable is missing or malformed."""
        accelerator = environ.get("DROPFORGE_TPU_ACCELERATOR", "")
        topology = environ.get("DROPFORGE_TPU_TOPOLOGY", "")
        counts = [environ.get(name, "") for name in ("DROPFORGE_TPU_HOSTS", "DROPFORGE_TPU_CHIPS_PER_HOST")]
        if (
            accelerator not in GENERATIONS
            or not topology
            or not all(count.isdecimal() and int(count) for count in counts)
        ):
            raise config_error(
                f"DROPFORGE_TPU_ACCELERATOR, _TOPOLOGY, _HOSTS and _CHIPS_PER_HOST are {accelerator!r}, {topology!r}, "
                f"{counts[0]!r}, {counts[1]!r}; expected one of {', '.join(GENERATIONS)}, a topology, two numbers",
                "the control plane sets these variables",
            )
        return cls(accelerator, topology, int(counts[0]), int(counts[1]))

    def scaling(self, *, tpu: bool) -> dict[str, Any]:
        """The arguments of ScalingConfig. Without TPUs, the same workers on the same hosts use the CPU."""
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
            "resources_per_worker": {"CPU": 1},  # Ray refuses TPU here; the head offers workers no CPUs
            "placement_strategy": "STRICT_SPREAD",
        }
