"""The TPU VMs of one machine that Cloud TPU offers: chips, zones, runtimes and disks, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from dropforge.platforms.facts import Source
from dropforge.platforms.prices import HourlyPrice
from dropforge.platforms.tpus import tpu_price
from dropforge.spec.demand import Quota, is_counted, is_preemptible

_ZONES = Source("https://cloud.google.com/tpu/docs/regions-zones", date(2026, 11, 20))
_QUOTAS = Source("ids in public repositories; https://cloud.google.com/tpu/docs/quota", date(2026, 11, 22))


@dataclass(frozen=True)
class TpuVm:
    """A TPU slice of one machine: its chips, its zones, the runtimes that boot on it, and the type of its data disk.

    `generation` is its name in the price list. The host's memory is from the table of VM types of each generation
    (https://cloud.google.com/tpu/docs/v5e and its like); platforms/ray/catalog.py says how sure each figure is.
    """

    generation: str
    chips: int
    memory_gib: float  # of each chip
    host_memory_gb: int
    zones: tuple[str, ...]
    runtimes: tuple[str, ...]
    disk_type: str
    source: Source = _ZONES


_V5E_ZONES = ("europe-west4-b", "us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a")
_V5P_ZONES = ("europe-west4-b", "us-central1-a", "us-east5-a")
_V6E_ZONES = ("europe-west4-a", "us-central1-b", "us-east1-d", "us-east5-a", "us-east5-b")
_ANY_TPU = "tpu-ubuntu2204-base"

# By accelerator type; the first runtime is the default (https://cloud.google.com/tpu/docs/regions-zones, .../runtimes,
# .../attach-durable-block-storage). Slices of several machines need target `ray`, which coordinates them.
TPU_VMS = {
    **{
        f"v5litepod-{n}": TpuVm("v5e", n, 16, gb, _V5E_ZONES, ("v2-alpha-tpuv5-lite", _ANY_TPU), "pd-balanced")
        for n, gb in ((1, 48), (4, 192), (8, 384))
    },
    "v5p-8": TpuVm("v5p", 4, 95, 448, _V5P_ZONES, ("v2-alpha-tpuv5", _ANY_TPU), "pd-balanced"),
    **{
        f"v6e-{n}": TpuVm("v6e", n, 32, gb, _V6E_ZONES, ("v2-alpha-tpuv6e", _ANY_TPU), "hyperdisk-balanced")
        for n, gb in ((1, 176), (4, 720), (8, 1440))
    },
}


@dataclass(frozen=True)
class TpuQuota:
    """The TPU API's quotas of a generation, on demand and preemptible, and the units of one chip."""

    on_demand: str
    preemptible: str
    units: int
    source: Source = _QUOTAS


# Google's page says that TPU VMs of 1, 4 and 8 v5e chips use the quota for serving. v5p counts cores, two to a chip.
TPU_QUOTAS = {
    "v5e": TpuQuota("TPUV5sLitepodServing", "TPUV5sPreemptibleLitepodServing", 1),
    "v5p": TpuQuota("TPUV5P", "TPUV5PPreemptible", 2),
    "v6e": TpuQuota("TPUV6E", "TPUV6EPreemptible", 1),
}


def tpu_vm_quota(accelerator_type: str, zone: str, capacity: str) -> Quota | None:
    """The quota that counts a TPU VM's chips in a zone, bought as `capacity` says; None when it is not known."""
    if accelerator_type not in TPU_VMS or not is_counted(capacity):
        return None
    counted = TPU_QUOTAS[TPU_VMS[accelerator_type].generation]
    name = counted.preemptible if is_preemptible(capacity) else counted.on_demand
    return Quota("tpu.googleapis.com", f"{name}PerProjectPerZoneForTPUAPI", {"zone": zone}, counted.units)


def tpu_vm_price(accelerator_type: str, zone: str, capacity: str, field: str) -> HourlyPrice:
    """The hourly price of a TPU VM without its data disk; `field` of the spec is the mend if it is unknown."""
    known = TPU_VMS[accelerator_type]
    return tpu_price(known.generation, known.chips, zone.rpartition("-")[0], capacity, field)
