"""The GPUs of Google Cloud: memory, architecture, and the oldest driver that runs them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from .facts import Source

# https://cloud.google.com/compute/docs/gpus has the memory, NVIDIA's page the compute capability.
_GPUS = Source("https://developer.nvidia.com/cuda-gpus", date(2026, 11, 22))
# PyTorch's figures are from public logs (torch.cuda.get_device_properties), rounded down.
# Driver 570 knows Blackwell, but Triton kernels of CUDA 12.9 do not load under it ("device kernel image is invalid").
_BLACKWELL_DRIVER = 580


@dataclass(frozen=True)
class Gpu:
    """A GPU by GKE's name: its memory, its compute capability, and the oldest driver branch that runs it.

    `reported_gib` is the memory that PyTorch reports, which is less than the memory in the name.
    """

    name: str
    memory_gib: float
    reported_gib: float
    capability: tuple[int, int]
    least_driver: int = 525
    source: Source = _GPUS


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("nvidia-l4", 24, 22.0, (8, 9)),
        Gpu("nvidia-rtx-pro-6000", 96, 94.9, (12, 0), _BLACKWELL_DRIVER),
        Gpu("nvidia-tesla-t4", 16, 14.5, (7, 5)),
        Gpu("nvidia-tesla-a100", 40, 39.3, (8, 0)),
        Gpu("nvidia-a100-80gb", 80, 79.1, (8, 0)),
        Gpu("nvidia-h100-80gb", 80, 79.1, (9, 0)),
        Gpu("nvidia-h100-mega-80gb", 80, 79.1, (9, 0)),
        Gpu("nvidia-h200-141gb", 141, 139.7, (9, 0)),
        Gpu("nvidia-b200", 180, 178.0, (10, 0), _BLACKWELL_DRIVER),
    )
}
