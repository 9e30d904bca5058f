"""What Cloud Run offers: accelerators, machines, regions and prices, each with its source."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from dropforge.platforms.prices import SECONDS_PER_HOUR, HourlyPrice, Price


@dataclass(frozen=True)
class CloudRunMachine:
    """The least CPU and memory that Cloud Run gives beside one accelerator, and the regions that have it."""

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

# The quota of each accelerator: the word in its id, and the units of one GPU (the newer one counts thousandths).
# The ids are those that projects list and that Google's refusals name, as noted in public repositories (2026-11-22).
CLOUD_RUN_QUOTAS = {"nvidia-l4": ("NvidiaL4", 1), "nvidia-rtx-pro-6000": ("NvidiaRtxPro6000", 1000)}

# GPU tasks of Cloud Run jobs: 12 h at most, preview above 1 h
# (https://cloud.google.com/run/docs/configuring/task-timeout)
CLOUD_RUN_MAX_TASK_SECONDS = 12 * SECONDS_PER_HOUR

_TIER_1 = ("europe-west1", "europe-west4", "us-central1", "us-east4")
_CLOUD_RUN_PAGE = "https://cloud.google.com/run/pricing"

# Cloud Run, instance-based billing. The GPU row is without zonal redundancy.
CLOUD_RUN_PRICES = {
    "vcpu": Price(0.000018 * SECONDS_PER_HOUR, _TIER_1, date(2026, 4, 30), _CLOUD_RUN_PAGE),
    "memory_gib": Price(0.000002 * SECONDS_PER_HOUR, _TIER_1, date(2026, 4, 30), _CLOUD_RUN_PAGE),
    "nvidia-l4": Price(0.0001867 * SECONDS_PER_HOUR, _TIER_1, date(2026, 4, 30), _CLOUD_RUN_PAGE),
}


def cloud_run_regions() -> list[str]:
    """Every region in which dropforge may create a resource of Cloud Run."""
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
            return HourlyPrice(None, None, f"no price for Cloud Run {part} in {region} in the catalog")
        total += price.usd_per_hour * count
    oldest = min(CLOUD_RUN_PRICES[part].as_of for part in parts)
    return HourlyPrice(round(total, 4), oldest, _CLOUD_RUN_PAGE)
