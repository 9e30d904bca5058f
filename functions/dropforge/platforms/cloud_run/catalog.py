"""Cloud Run's accelerators, machines, drivers, regions, limits and prices, each with its source and date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date

from dropforge.platforms.facts import Source
from dropforge.platforms.images import Driver
from dropforge.platforms.prices import SECONDS_PER_HOUR, HourlyPrice, Price

_GPU_PAGE = Source("https://docs.cloud.google.com/run/docs/configuring/jobs/gpu", date(2026, 10, 7))
_QUOTAS = Source("ids that projects list and Google's refusals name, in public repositories", date(2026, 11, 22))
_TIMEOUTS = Source("https://docs.cloud.google.com/run/docs/configuring/task-timeout", date(2026, 11, 22))
_PROBES = Source("https://docs.cloud.google.com/run/docs/configuring/jobs/healthchecks", date(2026, 11, 22))
_DISKS = Source("https://docs.cloud.google.com/run/docs/configuring/jobs/ephemeral-disk", date(2026, 11, 22))


@dataclass(frozen=True)
class CloudRunMachine:
    """The CPU and memory that Cloud Run gives beside one accelerator, and the regions that have it.

    `most_memory_gib`: the numbers of CPUs that an instance may have, each with its most memory; empty where Google's
    pages give the minimum only.
    """

    min_cpu: int
    min_memory_gib: int
    regions: tuple[str, ...]
    source: Source
    most_memory_gib: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CloudRunQuota:
    """The quota of an accelerator: the word in its id, and the units of one GPU (the newer one counts thousandths)."""

    word: str
    units: int
    source: Source


@dataclass(frozen=True)
class HostQuota:
    """The quota of CPU or memory in a region, and its units of one vCPU or GiB."""

    id: str
    units: int
    source: Source


@dataclass(frozen=True)
class Limit:
    """The largest value that Cloud Run takes, in the unit that the name of the constant says."""

    most: int
    source: Source


@dataclass(frozen=True)
class Preview:
    """A value that is in Preview: a request with it needs `launchStage` BETA."""

    what: str
    source: Source


# Some regions need an invitation: asia-south1 and us-central1 for the L4.
CLOUD_RUN_MACHINES = {
    "nvidia-l4": CloudRunMachine(
        min_cpu=4,
        min_memory_gib=16,
        regions=("asia-south1", "asia-southeast1", "europe-west1", "europe-west4", "us-central1", "us-east4"),
        source=_GPU_PAGE,
        # https://docs.cloud.google.com/run/docs/configuring/jobs/memory-limits (2026-11-26). Instances of 1 and 2 CPUs
        # are too small for a GPU; 8 CPUs and 32 GiB are the most.
        most_memory_gib={4: 16, 6: 24, 8: 32},
    ),
    "nvidia-rtx-pro-6000": CloudRunMachine(
        min_cpu=20,
        min_memory_gib=80,
        regions=("asia-southeast1", "europe-west4", "us-central1"),
        source=_GPU_PAGE,
    ),
}

# The driver that Cloud Run mounts into a container: 535.216.03 and 580.x on the page.
CLOUD_RUN_DRIVERS = {
    "nvidia-l4": Driver(535, _GPU_PAGE),
    "nvidia-rtx-pro-6000": Driver(580, _GPU_PAGE),
}

CLOUD_RUN_QUOTAS = {
    "nvidia-l4": CloudRunQuota("NvidiaL4", 1, _QUOTAS),
    "nvidia-rtx-pro-6000": CloudRunQuota("NvidiaRtxPro6000", 1000, _QUOTAS),
}

# Refusals of April and August 2026 show both ids, their units, and a new project's values: 20 vCPUs and 40 GiB.
_ALLOCATIONS = Source("https://github.com/googlecodelabs/feedback/issues/1856", date(2026, 4, 22))
CPU_QUOTA = HostQuota("CpuAllocPerProjectRegion", 1000, _ALLOCATIONS)
MEMORY_QUOTA = HostQuota("MemAllocPerProjectRegion", 2**30, _ALLOCATIONS)

GPU_TASK_SECONDS = Limit(12 * SECONDS_PER_HOUR, _TIMEOUTS)
GPU_TASK_SECONDS_WITHOUT_PREVIEW = Limit(SECONDS_PER_HOUR, _TIMEOUTS)
# failureThreshold times periodSeconds of a startup probe beside a GPU; 600 s without a GPU.
GPU_STARTUP_SECONDS = Limit(1800, _PROBES)

# The values that dropforge can send and that Google's pages call Preview. A newer page may call one of them generally
# available; BETA is allowed then, too.
PREVIEWS = {
    "gpu_task_timeout": Preview("a task with a GPU that may take more than an hour", _TIMEOUTS),
    "ephemeral_disk": Preview("a volume emptyDir with medium DISK", _DISKS),
    "rtx_pro_6000": Preview(
        "the accelerator nvidia-rtx-pro-6000",
        Source("https://docs.cloud.google.com/run/docs/configuring/jobs/gpu", date(2026, 2, 3)),
    ),
}

_TIER_1 = ("europe-west1", "europe-west4", "us-central1", "us-east4")
_CLOUD_RUN_PAGE = "https://cloud.google.com/run/pricing"
_RTX = "nvidia-rtx-pro-6000"

# Cloud Run, instance-based billing. A GPU's row is without zonal redundancy unless it says so.
CLOUD_RUN_PRICES = {
    "vcpu": Price(0.000018 * SECONDS_PER_HOUR, _TIER_1, date(2026, 4, 30), _CLOUD_RUN_PAGE),
    "memory_gib": Price(0.000002 * SECONDS_PER_HOUR, _TIER_1, date(2026, 4, 30), _CLOUD_RUN_PAGE),
    "nvidia-l4": Price(0.0001867 * SECONDS_PER_HOUR, _TIER_1, date(2026, 4, 30), _CLOUD_RUN_PAGE),
    _RTX: Price(0.00036522 * SECONDS_PER_HOUR, ("us-central1",), date(2026, 5, 14), _CLOUD_RUN_PAGE),
    f"{_RTX} with zonal redundancy": Price(
        0.00056913 * SECONDS_PER_HOUR, ("us-central1",), date(2026, 5, 14), _CLOUD_RUN_PAGE
    ),
}


def cloud_run_regions() -> list[str]:
    """Every region in which dropforge may create a resource of Cloud Run."""
    return sorted({region for machine in CLOUD_RUN_MACHINES.values() for region in machine.regions})


def cloud_run_price(
    accelerator: str, region: str, cpu: int, memory_gib: int, zonal_redundancy: bool = False, disk_gib: int = 0
) -> HourlyPrice:
    """The hourly price of one Cloud Run instance with one accelerator; unknown parts make it unknown.

    The price of an ephemeral disk is not known.
    """
    gpu = f"{accelerator} with zonal redundancy" if zonal_redundancy else accelerator
    parts = {"vcpu": cpu, "memory_gib": memory_gib, gpu: 1}
    if disk_gib:
        parts["ephemeral disk"] = disk_gib
    total = 0.0
    for part, count in parts.items():
        price = CLOUD_RUN_PRICES.get(part)
        if price is None or region not in price.regions:
            where = f"{part} in {region} in the catalog"
            return HourlyPrice(None, None, f"no price for Cloud Run {where}; set price_usd_per_hour")
        total += price.usd_per_hour * count
    oldest = min(CLOUD_RUN_PRICES[part].as_of for part in parts)
    return HourlyPrice(round(total, 4), oldest, _CLOUD_RUN_PAGE)
