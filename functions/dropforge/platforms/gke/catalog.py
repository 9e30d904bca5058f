"""What GKE Autopilot offers: accelerators, nodes and prices, each with its source."""

from __future__ import annotations

from datetime import date

from dropforge.platforms.prices import HourlyPrice, Price
from dropforge.spec.demand import Quota, is_counted, is_preemptible

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
GKE_CLUSTER_USD_PER_HOUR = 0.10  # https://cloud.google.com/kubernetes-engine/pricing


def gke_price(accelerator: str, gpus: int, region: str, capacity: str) -> HourlyPrice:
    """The hourly price of machines with `gpus` of an accelerator in all, bought as `capacity` says."""
    price = GKE_PRICES.get((accelerator, _BOOKED.get(capacity, capacity)))
    if price is None or region not in price.regions:
        where = f"{accelerator} in {region} as {capacity}"
        return HourlyPrice(None, None, f"no price for GKE {where} in the catalog; set price_usd_per_hour")
    return HourlyPrice(round(price.usd_per_hour * gpus, 4), price.as_of, price.source)


# Compute Engine's quotas, which GKE uses too. On demand, one quota with a dimension counts the newer GPU families.
# The ids are those that projects list and that Google's refusals name, as noted in public repositories (2026-11-22).
GPU_QUOTAS = {
    "nvidia-l4": "NVIDIA-L4",
    "nvidia-tesla-t4": "NVIDIA-T4",
    "nvidia-tesla-a100": "NVIDIA-A100",
    "nvidia-a100-80gb": "NVIDIA-A100-80GB",
}
GPU_FAMILY_QUOTAS = {
    "nvidia-rtx-pro-6000": "NVIDIA-RTX-PRO-6000",
    "nvidia-h100-80gb": "NVIDIA-H100",
    "nvidia-h100-mega-80gb": "NVIDIA-H100-MEGA",
    "nvidia-h200-141gb": "NVIDIA-H200",
    "nvidia-b200": "NVIDIA-B200",
}


def gpu_quota(accelerator: str, region: str, capacity: str) -> Quota | None:
    """The quota that counts a GPU in a region, bought as `capacity` says; None when it is not known."""
    model = GPU_QUOTAS.get(accelerator) or GPU_FAMILY_QUOTAS.get(accelerator)
    if model is None or not is_counted(capacity):
        return None
    if not is_preemptible(capacity) and accelerator in GPU_FAMILY_QUOTAS:
        dimensions = {"region": region, "gpu_family": model.replace("-", "_")}
        return Quota("compute.googleapis.com", "GPUS-PER-GPU-FAMILY-per-project-region", dimensions)
    prefix = "PREEMPTIBLE-" if is_preemptible(capacity) else ""
    return Quota("compute.googleapis.com", f"{prefix}{model}-GPUS-per-project-region", {"region": region})
