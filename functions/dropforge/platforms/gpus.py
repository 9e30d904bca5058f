"""The GPUs of Google Cloud, with their memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU by GKE's name, and its memory."""

    name: str
    memory_gib: float


# https://cloud.google.com/compute/docs/gpus
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("nvidia-l4", 24),
        Gpu("nvidia-rtx-pro-6000", 96),
        Gpu("nvidia-tesla-t4", 16),
        Gpu("nvidia-tesla-a100", 40),
        Gpu("nvidia-a100-80gb", 80),
        Gpu("nvidia-h100-80gb", 80),
        Gpu("nvidia-h100-mega-80gb", 80),
        Gpu("nvidia-h200-141gb", 141),
        Gpu("nvidia-b200", 180),
    )
}
