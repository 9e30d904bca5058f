"""What Google Cloud offers, as data: accelerators, regions, memory, and dated prices with their sources.

A price that is not here is unknown (None), never zero. Facts and their age: the `source` of each row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import date
from math import prod

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator, and its device memory in GiB."""

    name: str
    memory_gib: float


# https://cloud.google.com/compute/docs/gpus
ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("nvidia-l4", 24),
        Accelerator("nvidia-rtx-pro-6000", 96),
        Accelerator("nvidia-tesla-t4", 16),
        Accelerator("nvidia-tesla-a100", 40),
        Accelerator("nvidia-a100-80gb", 80),
        Accelerator("nvidia-h100-80gb", 80),
        Accelerator("nvidia-h100-mega-80gb", 80),
        Accelerator("nvidia-h200-141gb", 141),
        Accelerator("nvidia-b200", 180),
    )
}


@dataclass(frozen=True)
class CloudRunMachine:
    """What Cloud Run has beside one accelerator at least, and where."""

    min_cpu: int
    min_memory_gib: int
    regions: tuple[str, ...]


# https://cloud.google.com/run/docs/configuring/jobs/gpu (regions: some need an invitation)
CLOUD_RUN_MACHINES = {
    "nvidia-l4": CloudRunMachine(
        min_cpu=4,
        min_memory_gib=16,
        regions=("asia-south1", "asia-southeast1", "europe-west1", "europe-west4", "us-central1", "us-east4"),
    ),
    "nvidia-rtx-pro-6000": CloudRunMachine(min_cpu=20, min_memory_gib=80, regions=("europe-west4", "us-central1")),
}

# How many GPUs a node of GKE Autopilot may have, by the accelerator's label
# (https://cloud.google.com/kubernetes-engine/docs/how-to/autopilot-gpus)
GKE_ACCELERATORS: dict[str, tuple[int, ...]] = {
    "nvidia-l4": (1, 2, 4, 8),
    "nvidia-rtx-pro-6000": (1, 2, 4, 8),
    "nvidia-tesla-t4": (1, 2, 4),
    "nvidia-tesla-a100": (1, 2, 4, 8, 16),
    "nvidia-a100-80gb": (1, 2, 4, 8),
    "nvidia-h100-80gb": (1, 2, 4, 8),
    "nvidia-h100-mega-80gb": (8,),
    "nvidia-h200-141gb": (8,),
    "nvidia-b200": (8,),
}


@dataclass(frozen=True)
class GkeTpu:
    """The slices that GKE makes of one TPU generation: given by name, or (three dimensions) by a rule."""

    memory_gib: float  # of each chip
    topologies: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """What a topology may be, for an error message."""
        if self.topologies:
            return f"one of {', '.join(self.topologies)}"
        return "three numbers such as 2x2x4, none smaller than the one before, each 1, 2, or a multiple of 4"


@dataclass(frozen=True)
class TpuSlice:
    """A slice of TPU hosts; `chips` are a host's."""

    hosts: int
    chips: int


_FLAT_SLICES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
# By the label cloud.google.com/gke-tpu-accelerator (https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus)
GKE_TPUS = {
    "tpu-v4-podslice": GkeTpu(32),
    "tpu-v5-lite-podslice": GkeTpu(16, _FLAT_SLICES),
    "tpu-v5p-slice": GkeTpu(95),
    "tpu-v6e-slice": GkeTpu(32, _FLAT_SLICES),
}
TPU_HOST_CHIPS = 4  # of every slice of several hosts; one host alone has up to 8


def tpu_slice(accelerator: str, topology: str) -> TpuSlice | None:
    """The hosts of a slice, by its topology (`4x4`, `2x2x2`); None when GKE makes no such slice."""
    known = GKE_TPUS.get(accelerator)
    if known is None or not re.fullmatch(r"[1-9]\d{0,2}(x[1-9]\d{0,2}){1,2}", topology):
        return None
    sides = [int(side) for side in topology.split("x")]
    if known.topologies and topology not in known.topologies:
        return None
    if not known.topologies and not _is_cuboid(sides):
        return None
    chips = prod(sides)
    if chips <= TPU_HOST_CHIPS or (known.topologies and chips == 8):
        return TpuSlice(1, chips)
    return TpuSlice(chips // TPU_HOST_CHIPS, TPU_HOST_CHIPS)


def _is_cuboid(sides: list[int]) -> bool:
    """Whether hosts of 2x2x1 chips make it: the last side may be 1 only where the slice is one host."""
    fits = all(side in (1, 2) or side % 4 == 0 for side in sides)
    whole = sides == [2, 2, 1] or (sides == sorted(sides) and sides[0] >= 2)
    return len(sides) == 3 and fits and whole


@dataclass(frozen=True)
class TpuVm:
    """A TPU slice of one machine: its chips, where it is, what boots on it, and the kind of disk that it takes."""

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
# .../attach-durable-block-storage). Slices of several machines are for the target that coordinates them.
TPU_VMS = {
    **{f"v5litepod-{n}": TpuVm(n, 16, _V5E_ZONES, ("v2-alpha-tpuv5-lite", _ANY_TPU), "pd-balanced") for n in (1, 4, 8)},
    "v5p-8": TpuVm(4, 95, _V5P_ZONES, ("v2-alpha-tpuv5", _ANY_TPU), "pd-balanced"),
    **{f"v6e-{n}": TpuVm(n, 32, _V6E_ZONES, ("v2-alpha-tpuv6e", _ANY_TPU), "hyperdisk-balanced") for n in (1, 4, 8)},
}

# GPU tasks of Cloud Run jobs: 12 h at most, preview above 1 h
# (https://cloud.google.com/run/docs/configuring/task-timeout)
CLOUD_RUN_MAX_TASK_SECONDS = 12 * SECONDS_PER_HOUR


@dataclass(frozen=True)
class Price:
    """What one unit costs for one hour, where, and who says so."""

    usd_per_hour: float
    regions: tuple[str, ...]
    as_of: date
    source: str


_TIER_1 = ("europe-west1", "europe-west4", "us-central1", "us-east4")
_CLOUD_RUN_PAGE = "https://cloud.google.com/run/pricing"

# Cloud Run, instance-based billing. The GPU row is without zonal redundancy.
CLOUD_RUN_PRICES = {
    "vcpu": Price(0.000018 * SECONDS_PER_HOUR, _TIER_1, date(2026, 4, 30), _CLOUD_RUN_PAGE),
    "memory_gib": Price(0.000002 * SECONDS_PER_HOUR, _TIER_1, date(2026, 4, 30), _CLOUD_RUN_PAGE),
    "nvidia-l4": Price(0.0001867 * SECONDS_PER_HOUR, _TIER_1, date(2026, 4, 30), _CLOUD_RUN_PAGE),
}


@dataclass(frozen=True)
class HourlyPrice:
    """The price of a whole machine for an hour, or why it is not known."""

    usd_per_hour: float | None
    as_of: date | None
    source: str

    def times(self, machines: int) -> HourlyPrice:
        """The price of several such machines."""
        total = None if self.usd_per_hour is None else self.usd_per_hour * machines
        return replace(self, usd_per_hour=total)


def cloud_run_regions() -> list[str]:
    """Every region where Cloud Run may have something of ours."""
    return sorted({region for machine in CLOUD_RUN_MACHINES.values() for region in machine.regions})


def cloud_run_price(
    accelerator: str, region: str, cpu: int, memory_gib: int, zonal_redundancy: bool = False
) -> HourlyPrice:
    """The hourly price of one Cloud Run instance with one accelerator; unknown parts make it unknown."""
    gpu = f"{accelerator} with zonal redundancy" if zonal_redundancy else accelerator
    parts = {"vcpu": cpu, "memory_gib": memory_gib, gpu: 1}
    total = 0.0
    for part, count in parts.items():
        price = CLOUD_RUN_PRICES.get(part)
        if price is None or region not in price.regions:
            return HourlyPrice(None, None, f"no price for Cloud Run {part} in {region} in dropforge/catalog.py")
        total += price.usd_per_hour * count
    oldest = min(CLOUD_RUN_PRICES[part].as_of for part in parts)
    return HourlyPrice(round(total, 4), oldest, _CLOUD_RUN_PAGE)


_GPU_PAGE = "https://cloud.google.com/compute/gpus-pricing"
_REGION_1 = ("us-central1",)
_BOOKED = {"reservation": "on_demand"}  # what is reserved costs the list price, used or not

# Compute Engine's list prices for one GPU with its share of the host. Those of 31 August are from a copy of the Cloud
# Billing catalog made by then (SkyPilot's, schema 8). Its Spot prices are left out, because they have risen since, and
# so are rows that look like another class of use (A100 80 GB). Autopilot's premium is not included.
GKE_PRICES = {
    ("nvidia-tesla-a100", "on_demand"): Price(3.67339, _REGION_1, date(2026, 8, 31), _GPU_PAGE),
    ("nvidia-h100-80gb", "on_demand"): Price(10.97906, ("us-central1", "us-east4"), date(2026, 9, 26), _GPU_PAGE),
    ("nvidia-h100-80gb", "spot"): Price(6.571, _REGION_1, date(2026, 9, 26), _GPU_PAGE),
    ("nvidia-h100-mega-80gb", "on_demand"): Price(92.21427 / 8, _REGION_1, date(2026, 8, 31), _GPU_PAGE),
    ("nvidia-h200-141gb", "on_demand"): Price(86.75992 / 8, _REGION_1, date(2026, 8, 31), _GPU_PAGE),
    ("nvidia-b200", "on_demand"): Price(90.216 / 8, _REGION_1, date(2026, 8, 31), _GPU_PAGE),
}
GKE_CLUSTER_USD_PER_HOUR = 0.10  # https://cloud.google.com/kubernetes-engine/pricing


def gke_price(accelerator: str, gpus: int, region: str, capacity: str) -> HourlyPrice:
    """The hourly price of machines with `gpus` of an accelerator in all, bought as `capacity` says."""
    price = GKE_PRICES.get((accelerator, _BOOKED.get(capacity, capacity)))
    if price is None or region not in price.regions:
        where = f"{accelerator} in {region} as {capacity}"
        return HourlyPrice(None, None, f"no price for GKE {where} in dropforge/catalog.py; set price_usd_per_hour")
    return HourlyPrice(round(price.usd_per_hour * gpus, 4), price.as_of, price.source)
