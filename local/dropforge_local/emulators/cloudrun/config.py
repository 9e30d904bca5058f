"""Facts that differ between regions, projects and machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

GIB = 2**30

# https://cloud.google.com/run/docs/locations
_REGION_LIST = """
africa-south1 asia-east1 asia-east2 asia-northeast1 asia-northeast2 asia-northeast3 asia-south1 asia-south2
asia-southeast1 asia-southeast2 asia-southeast3 australia-southeast1 australia-southeast2 europe-central2
europe-north1 europe-north2 europe-southwest1 europe-west1 europe-west10 europe-west12 europe-west2 europe-west3
europe-west4 europe-west6 europe-west8 europe-west9 me-central1 me-central2 me-west1 northamerica-northeast1
northamerica-northeast2 northamerica-south1 southamerica-east1 southamerica-west1 us-central1 us-east1 us-east4
us-east5 us-south1 us-west1 us-west2 us-west3 us-west4
"""
REGIONS = frozenset(_REGION_LIST.split())


@dataclass(frozen=True)
class Gpu:
    """An accelerator: the least CPU and memory of its instances, its regions, and its name in quota errors."""

    minimum_cpu: float
    minimum_memory_bytes: int
    regions: frozenset[str]
    quota: str


# https://cloud.google.com/run/docs/configuring/jobs/gpu and services/gpu
GPUS = MappingProxyType(
    {
        "nvidia-l4": Gpu(
            minimum_cpu=4,
            minimum_memory_bytes=16 * GIB,
            regions=frozenset(
                ["us-central1", "us-east4", "europe-west1", "europe-west4", "asia-southeast1", "asia-south1"]
            ),
            quota="NvidiaL4Gpu",
        ),
        "nvidia-rtx-pro-6000": Gpu(
            minimum_cpu=20,
            minimum_memory_bytes=80 * GIB,
            regions=frozenset(["us-central1", "europe-west4", "asia-southeast1"]),
            quota="NvidiaRtxPro6000Gpu",
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class CloudRunConfig:
    """Timings and quotas of the emulated Cloud Run."""

    operation_seconds: float = 0.05  # the shortest duration of a create, an update or a delete
    idle_seconds: float = 900.0  # from the last request to the end of the instance
    grace_seconds: float = 10.0  # between SIGTERM and SIGKILL: https://cloud.google.com/run/docs/container-contract
    probe_seconds: float = 0.25  # between two startup probes: shorter than a period, so that a local demo does not wait
    restart_seconds: float = 1.0  # delay before the first restart of a crashed minimum instance; doubles
    # Below the ports that systems give to outgoing connections, above those of Ray's clients (23000 to 24000).
    service_ports: range = range(24000, 30000)
    kept_logs: int = 200  # finished containers whose output stays readable, as in Cloud Logging
    regions: frozenset[str] = REGIONS
    gpus: Mapping[str, Gpu] = field(default_factory=lambda: GPUS)
    # Per project, region, type and kind of zonal redundancy. New projects reportedly get 3 without a request.
    gpu_quota: int = 3
