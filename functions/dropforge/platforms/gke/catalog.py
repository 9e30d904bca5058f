"""What GKE Autopilot offers: accelerators, nodes and prices, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import NamedTuple

from dropforge.platforms.facts import Source
from dropforge.platforms.images import Driver
from dropforge.platforms.prices import HourlyPrice, Price
from dropforge.spec.demand import Quota, is_counted, is_preemptible

_AUTOPILOT = Source("https://cloud.google.com/kubernetes-engine/docs/how-to/autopilot-gpus", date(2026, 11, 22))
_DRIVERS = Source("https://cloud.google.com/kubernetes-engine/docs/how-to/gpus", date(2026, 10, 9))
_QUOTAS = Source("ids that projects list and Google's refusals name, in public repositories", date(2026, 11, 22))


class PodSize(NamedTuple):
    """The most vCPUs and memory (GiB) that a pod may request."""

    cpu: int
    memory_gib: int


@dataclass(frozen=True)
class GkeGpu:
    """How many GPUs a node of GKE Autopilot may have, each with the largest pod beside them."""

    most: Mapping[int, PodSize]
    source: Source = _AUTOPILOT

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self.most)


# By the accelerator's label. Autopilot refuses a pod that is larger than the maxima of Google's table
# (https://cloud.google.com/kubernetes-engine/docs/concepts/autopilot-resource-requests), which could not be read on
# 2026-11-26. The sizes of L4, T4 and A100 are written from memory; a refusal confirms the first of the A100
# (https://github.com/argoproj/argo-workflows/issues/13073). The sizes of the other GPUs are those of whole machines
# (a3, a4 and g4), which is more than Autopilot gives: they refuse only what no machine has.
GKE_GPUS = {
    "nvidia-l4": GkeGpu({1: PodSize(31, 115), 2: PodSize(23, 86), 4: PodSize(47, 177), 8: PodSize(95, 367)}),
    "nvidia-rtx-pro-6000": GkeGpu(
        {1: PodSize(48, 180), 2: PodSize(96, 360), 4: PodSize(192, 720), 8: PodSize(384, 1440)}
    ),
    "nvidia-tesla-t4": GkeGpu({1: PodSize(46, 287), 2: PodSize(46, 287), 4: PodSize(94, 587)}),
    "nvidia-tesla-a100": GkeGpu(
        {
            1: PodSize(11, 74),
            2: PodSize(22, 148),
            4: PodSize(46, 310),
            8: PodSize(94, 632),
            16: PodSize(94, 1264),
        }
    ),
    "nvidia-a100-80gb": GkeGpu({1: PodSize(11, 148), 2: PodSize(22, 310), 4: PodSize(46, 632), 8: PodSize(94, 1264)}),
    "nvidia-h100-80gb": GkeGpu({1: PodSize(26, 234), 2: PodSize(52, 468), 4: PodSize(104, 936), 8: PodSize(208, 1872)}),
    "nvidia-h100-mega-80gb": GkeGpu({8: PodSize(208, 1872)}),
    "nvidia-h200-141gb": GkeGpu({8: PodSize(224, 2952)}),
    "nvidia-b200": GkeGpu({8: PodSize(224, 3968)}),
}

# The driver that GKE installs on Container-Optimized OS of versions 1.31 to 1.33, by the value of the node label
# cloud.google.com/gke-gpu-driver-version. The page ends at 1.33. Without the label Autopilot installs "default".
GKE_DRIVERS = {"default": Driver(535, _DRIVERS), "latest": Driver(580, _DRIVERS)}
GKE_DRIVER_VERSION = "latest"  # what every pod with a GPU selects: CUDA 13 and Blackwell need 580


def gke_drivers() -> dict[str, Driver]:
    """The driver behind each accelerator, by the driver version that pods select."""
    return dict.fromkeys(GKE_GPUS, GKE_DRIVERS[GKE_DRIVER_VERSION])


_GPU_PAGE = "https://cloud.google.com/compute/gpus-pricing"
_REGION_1 = ("us-central1",)
_BOOKED = {"reservation": "on_demand"}  # reserved capacity costs the list price, used or not

# Compute Engine's list prices for one GPU with its share of the host. The prices of 31 August are from a copy of the
# Cloud Billing catalog of that day (SkyPilot's, schema 8). Its Spot prices are left out, because they have risen since.
# Rows that look like another class of use (A100 80 GB) are left out, too. Autopilot's premium is not included.
GKE_PRICES = {
    ("nvidia-tesla-a100", "on_demand"): Price(3.67339, _REGION_1, date(2026, 8, 31), _GPU_PAGE),
    ("nvidia-h100-80gb", "on_demand"): Price(10.97906, ("us-central1", "us-east4"), date(2026, 9, 26), _GPU_PAGE),
    ("nvidia-h100-80gb", "spot"): Price(6.571, _REGION_1, date(2026, 9, 26), _GPU_PAGE),
    ("nvidia-h100-mega-80gb", "on_demand"): Price(92.21427 / 8, _REGION_1, date(2026, 8, 31), _GPU_PAGE),
    ("nvidia-h200-141gb", "on_demand"): Price(86.75992 / 8, _REGION_1, date(2026, 8, 31), _GPU_PAGE),
    ("nvidia-b200", "on_demand"): Price(90.216 / 8, _REGION_1, date(2026, 8, 31), _GPU_PAGE),
}
GKE_CLUSTER_PRICE = Price(0.10, (), date(2026, 11, 23), "https://cloud.google.com/kubernetes-engine/pricing")


def gke_price(accelerator: str, gpus: int, region: str, capacity: str) -> HourlyPrice:
    """The hourly price of machines with `gpus` of an accelerator in all, bought as `capacity` says."""
    price = GKE_PRICES.get((accelerator, _BOOKED.get(capacity, capacity)))
    if price is None or region not in price.regions:
        where = f"{accelerator} in {region} as {capacity}"
        return HourlyPrice(None, None, f"no price for GKE {where} in the catalog; set price_usd_per_hour")
    return HourlyPrice(round(price.usd_per_hour * gpus, 4), price.as_of, price.source)


@dataclass(frozen=True)
class GpuQuota:
    """Compute Engine's quota of a GPU, which GKE uses, too.

    On demand, one quota with a dimension counts the newer families (`by_family`).
    """

    model: str
    by_family: bool
    source: Source = _QUOTAS


GPU_QUOTAS = {
    "nvidia-l4": GpuQuota("NVIDIA-L4", by_family=False),
    "nvidia-tesla-t4": GpuQuota("NVIDIA-T4", by_family=False),
    "nvidia-tesla-a100": GpuQuota("NVIDIA-A100", by_family=False),
    "nvidia-a100-80gb": GpuQuota("NVIDIA-A100-80GB", by_family=False),
    "nvidia-rtx-pro-6000": GpuQuota("NVIDIA-RTX-PRO-6000", by_family=True),
    "nvidia-h100-80gb": GpuQuota("NVIDIA-H100", by_family=True),
    "nvidia-h100-mega-80gb": GpuQuota("NVIDIA-H100-MEGA", by_family=True),
    "nvidia-h200-141gb": GpuQuota("NVIDIA-H200", by_family=True),
    "nvidia-b200": GpuQuota("NVIDIA-B200", by_family=True),
}


def gpu_quota(accelerator: str, region: str, capacity: str) -> Quota | None:
    """The quota that counts a GPU in a region, bought as `capacity` says; None when it is not known."""
    counted = GPU_QUOTAS.get(accelerator)
    if counted is None or not is_counted(capacity):
        return None
    if not is_preemptible(capacity) and counted.by_family:
        dimensions = {"region": region, "gpu_family": counted.model.replace("-", "_")}
        return Quota("compute.googleapis.com", "GPUS-PER-GPU-FAMILY-per-project-region", dimensions)
    prefix = "PREEMPTIBLE-" if is_preemptible(capacity) else ""
    name = f"{prefix}{counted.model}-GPUS-per-project-region"
    return Quota("compute.googleapis.com", name, {"region": region})
