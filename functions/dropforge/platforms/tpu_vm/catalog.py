"""The TPU VMs of one machine that Cloud TPU offers: chips, zones, runtimes and disks, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from dropforge.spec.demand import Quota, is_counted, is_preemptible


@dataclass(frozen=True)
class TpuVm:
    """A TPU slice of one machine: its chips, its zones, the runtimes that boot on it, and the type of its data disk."""

    chips: int
    memory_gib: float  # of each chip
    zones: tuple[str, ...]
    runtimes: tuple[str, ...]
    disk_type: str


_V5E_ZONES = ("europe-west4-b", "us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a")
_V5P_ZONES = ("europe-west4-b", "us-central1-a", "us-east5-a")
_V6E_ZONES = ("europe-west4-a", "us-central1-b", "us-east1-d", "us-east5-a", "us-east5-b")
_ANY_TPU = "tpu-ubuntu2204-base"

# By accelerator type; the first runtime is the default (https://cloud.google.com/tpu/docs/regions-zones, .../runtimes,
# .../attach-durable-block-storage). Slices of several machines need target `ray`, which coordinates them.
TPU_VMS = {
    **{f"v5litepod-{n}": TpuVm(n, 16, _V5E_ZONES, ("v2-alpha-tpuv5-lite", _ANY_TPU), "pd-balanced") for n in (1, 4, 8)},
    "v5p-8": TpuVm(4, 95, _V5P_ZONES, ("v2-alpha-tpuv5", _ANY_TPU), "pd-balanced"),
    **{f"v6e-{n}": TpuVm(n, 32, _V6E_ZONES, ("v2-alpha-tpuv6e", _ANY_TPU), "hyperdisk-balanced") for n in (1, 4, 8)},
}

# The TPU API's quotas, on demand and preemptible, and the units of one chip (v5p counts cores, two to a chip). The ids
# are noted in public repositories (2026-11-22); https://cloud.google.com/tpu/docs/quota says that TPU VMs of 1, 4 and 8
# v5e chips use the quota for serving.
_QUOTAS = {
    "v5litepod": ("TPUV5sLitepodServing", "TPUV5sPreemptibleLitepodServing", 1),
    "v5p": ("TPUV5P", "TPUV5PPreemptible", 2),
    "v6e": ("TPUV6E", "TPUV6EPreemptible", 1),
}


def tpu_vm_quota(accelerator_type: str, zone: str, capacity: str) -> Quota | None:
    """The quota that counts a TPU VM's chips in a zone, bought as `capacity` says; None when it is not known."""
    if accelerator_type not in TPU_VMS or not is_counted(capacity):
        return None
    on_demand, preemptible, units = _QUOTAS[accelerator_type.split("-")[0]]
    name = f"{preemptible if is_preemptible(capacity) else on_demand}PerProjectPerZoneForTPUAPI"
    return Quota("tpu.googleapis.com", name, {"zone": zone}, units)
