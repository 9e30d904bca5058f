"""Which quota counts the accelerators that a spec asks for, and how high it is in a project.

The ids are those that projects list and that Google's refusals name, as people have noted them in public repositories
(read on 2026-11-22), and that https://cloud.google.com/tpu/docs/quota says of v5e: TPU VMs of 1, 4 and 8 chips take the
quota for serving. None of them has been asked for by us.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dropforge.platforms.tpu_vm.catalog import TPU_VMS

from . import google_apis
from .google_apis import NotAsked, Refused

# Cloud Run's: the word in the id, and the units of one GPU (the newer one is counted in thousandths).
_CLOUD_RUN = {"nvidia-l4": ("NvidiaL4", 1), "nvidia-rtx-pro-6000": ("NvidiaRtxPro6000", 1000)}
# Compute Engine's, which GKE takes too; the other families are counted by one quota with a dimension when on demand.
_GPUS = {
    "nvidia-l4": "NVIDIA-L4",
    "nvidia-tesla-t4": "NVIDIA-T4",
    "nvidia-tesla-a100": "NVIDIA-A100",
    "nvidia-a100-80gb": "NVIDIA-A100-80GB",
}
_GPU_FAMILIES = {
    "nvidia-rtx-pro-6000": "NVIDIA-RTX-PRO-6000",
    "nvidia-h100-80gb": "NVIDIA-H100",
    "nvidia-h100-mega-80gb": "NVIDIA-H100-MEGA",
    "nvidia-h200-141gb": "NVIDIA-H200",
    "nvidia-b200": "NVIDIA-B200",
}
# The TPU API's, on demand and preemptible, and the units of one chip (v5p is counted in cores, two to a chip).
_TPU_VMS = {
    "v5litepod": ("TPUV5sLitepodServing", "TPUV5sPreemptibleLitepodServing", 1),
    "v5p": ("TPUV5P", "TPUV5PPreemptible", 2),
    "v6e": ("TPUV6E", "TPUV6EPreemptible", 1),
}
# GKE's slices are machines of Compute Engine: on demand and preemptible; of other generations the ids are not known.
_TPU_SLICES = {
    "tpu-v5p-slice": ("TPU-V5P-per-project-region", "PREEMPTIBLE-TPU-V5P-per-project-region"),
    "tpu-v6e-slice": ("TPUS-PER-TPU-FAMILY-per-project-region", "PREEMPTIBLE-TPU-V6E-per-project-region"),
}


class Quota(NamedTuple):
    """A quota at one place, and how many of its units one accelerator is."""

    service: str
    id: str
    dimensions: dict[str, str]
    units: int = 1


class Accelerators(NamedTuple):
    """What a target or an endpoint asks for at a place: a region, or a zone of TPU VMs.

    `name` is the catalog's: of a GPU, a TPU VM or a slice; `number` is of GPUs or chips.
    """

    kind: str  # the type of the target or of the endpoint
    name: str
    number: int
    place: str
    capacity: str = "on_demand"
    zonal_redundancy: bool = False

    def __str__(self) -> str:
        return f"{self.number} {self.name} in {self.place}"


def find(wanted: Accelerators) -> Quota:
    """The quota that counts it. Raises NotAsked when that is not known."""
    preemptible = wanted.capacity in ("spot", "flex_start")
    if wanted.capacity not in ("on_demand", "spot", "flex_start"):
        raise NotAsked(f"which quota counts capacity {wanted.capacity!r} is not known")
    if wanted.kind == "cloud_run" and wanted.name in _CLOUD_RUN:
        word, units = _CLOUD_RUN[wanted.name]
        redundancy = "" if wanted.zonal_redundancy else "NoZonalRedundancy"
        name = f"{word}GpuAlloc{redundancy}PerProjectRegion"
        return Quota("run.googleapis.com", name, {"region": wanted.place}, units)
    if wanted.kind == "tpu_vm" and wanted.name in TPU_VMS:
        on_demand, spot, units = _TPU_VMS[wanted.name.split("-")[0]]
        name = f"{spot if preemptible else on_demand}PerProjectPerZoneForTPUAPI"
        return Quota("tpu.googleapis.com", name, {"zone": wanted.place}, units)
    if wanted.kind == "ray" and wanted.name in _TPU_SLICES:
        name = _TPU_SLICES[wanted.name][preemptible]
        family = {"tpu_family": "CT6E"} if name.startswith("TPUS-PER-TPU-FAMILY") else {}
        return Quota("compute.googleapis.com", name, {"region": wanted.place, **family})
    if wanted.kind == "gke" and (model := _GPUS.get(wanted.name) or _GPU_FAMILIES.get(wanted.name)):
        if not preemptible and wanted.name in _GPU_FAMILIES:
            dimensions = {"region": wanted.place, "gpu_family": model.replace("-", "_")}
            return Quota("compute.googleapis.com", "GPUS-PER-GPU-FAMILY-per-project-region", dimensions)
        name = f"{'PREEMPTIBLE-' if preemptible else ''}{model}-GPUS-per-project-region"
        return Quota("compute.googleapis.com", name, {"region": wanted.place})
    raise NotAsked(f"which quota counts {wanted.name} is not known")


def limit(project: str, quota: Quota) -> float | None:
    """How many accelerators it lets a project have; None where it is listed without a value. Usage is not known.

    https://cloud.google.com/docs/quotas/reference/rest/v1/projects.locations.services.quotaInfos/get; raises NotAsked.
    """
    path = f"v1/projects/{project}/locations/global/services/{quota.service}/quotaInfos/{quota.id}"
    try:
        listed = google_apis.get("cloudquotas", path).get("dimensionsInfos", ())
    except Refused as error:
        if error.status == 404:
            raise NotAsked(f"no such quota is listed: {quota.id}") from None
        if error.status == 403:
            raise NotAsked(f"Cloud Quotas may not be asked for {quota.id}: {error}") from None
        raise
    fitting = [one for one in listed if _applies(one, quota)]
    if not fitting:
        raise NotAsked(f"{quota.id} is not listed for {_place(quota)}")
    value = max(fitting, key=lambda one: len(one.get("dimensions", {}))).get("details", {}).get("value")
    if value is None:
        return None
    return float(value) / quota.units if float(value) >= 0 else float("inf")


def _applies(one: dict[str, Any], quota: Quota) -> bool:
    """An entry without our dimensions is a default, for the places that it lists."""
    dimensions, place = one.get("dimensions", {}), _place(quota)
    here = place in one.get("applicableLocations", ()) or place in dimensions.values()
    return here and dimensions.items() <= quota.dimensions.items()


def _place(quota: Quota) -> str:
    return quota.dimensions.get("zone") or quota.dimensions["region"]
