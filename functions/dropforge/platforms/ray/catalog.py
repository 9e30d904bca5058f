"""The TPU slices that GKE makes: chips, hosts and topologies, and the machines of the hosts, each with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from math import prod

from dropforge.platforms.facts import Source
from dropforge.spec.demand import Quota, is_counted, is_preemptible

_PLAN = Source("https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus", date(2026, 11, 20))
_QUOTAS = Source("ids that projects list and Google's refusals name, in public repositories", date(2026, 11, 22))


@dataclass(frozen=True)
class TpuHost:
    """The machine of a TPU host, as Google's tables describe it.

    The pod that has the host alone leaves room for the system: GKE reserves less than 1 vCPU, and of memory 25 % of the
    first 4 GiB, 20 % of the next 4, 10 % of the next 8, 6 % of the next 112 and 2 % of the rest, which is 10 % of the
    smallest host (https://cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes); agents of logging,
    monitoring and networking run beside the pod. A host costs the same whatever its pod requests.
    """

    machine: str
    vcpus: int
    memory_gb: int

    @property
    def pod_cpu(self) -> int:
        """The vCPUs for the pod: nine tenths."""
        return self.vcpus * 9 // 10

    @property
    def pod_memory_gib(self) -> int:
        """The memory for the pod: eight tenths."""
        return self.memory_gb * 10**9 * 8 // (10 * 2**30)


@dataclass(frozen=True)
class GkeTpu:
    """The slices that GKE makes of one TPU generation: given by name, or (three dimensions) by a rule.

    `generation` is its name in the price list (platforms/tpus.py).
    """

    generation: str
    memory_gib: float  # of each chip
    hosts: Mapping[int, TpuHost]  # by chips
    topologies: tuple[str, ...] = ()
    source: Source = _PLAN

    @property
    def expected(self) -> str:
        """The allowed topologies, for an error message."""
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
# Hosts: https://cloud.google.com/tpu/docs/v5e (the table of VM types, read on 2026-11-23). The other pages' tables
# (https://cloud.google.com/tpu/docs/v4, v5p and v6e) could not be read that day; their figures are those of Google's
# earlier tables, and a public log of a ct6e-standard-4t shows 180 vCPUs and 708 GB. For ct6e-standard-8t public notes
# disagree (180 or 360 vCPUs): the smaller always fits.
GKE_TPUS = {
    "tpu-v4-podslice": GkeTpu("v4", 32, {4: TpuHost("ct4p-hightpu-4t", 240, 407)}),
    "tpu-v5-lite-podslice": GkeTpu(
        "v5e",
        16,
        {
            1: TpuHost("ct5lp-hightpu-1t", 24, 48),
            4: TpuHost("ct5lp-hightpu-4t", 112, 192),
            8: TpuHost("ct5lp-hightpu-8t", 224, 384),
        },
        _FLAT_SLICES,
    ),
    "tpu-v5p-slice": GkeTpu("v5p", 95, {4: TpuHost("ct5p-hightpu-4t", 208, 448)}),
    "tpu-v6e-slice": GkeTpu(
        "v6e",
        32,
        {
            1: TpuHost("ct6e-standard-1t", 44, 176),
            4: TpuHost("ct6e-standard-4t", 180, 720),
            8: TpuHost("ct6e-standard-8t", 180, 1440),
        },
        _FLAT_SLICES,
    ),
}


@dataclass(frozen=True)
class PodLimit:
    """The most vCPUs and memory (GiB) of a pod without an accelerator, by Autopilot's compute class."""

    cpu: int
    memory_gib: int
    source: Source


# From memory, but for 30 vCPUs. The table could not be read on that day:
# https://cloud.google.com/kubernetes-engine/docs/concepts/autopilot-resource-requests
_SIZES = Source("figures of Autopilot's pods from memory", date(2026, 11, 26))
GENERAL_PURPOSE, BALANCED = PodLimit(30, 110, _SIZES), PodLimit(222, 851, _SIZES)
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
class SliceQuota:
    """Compute Engine's quotas of a slice, on demand and preemptible: GKE's slices are machines of Compute Engine."""

    on_demand: str
    preemptible: str
    source: Source = _QUOTAS


# The ids of other generations are not known.
SLICE_QUOTAS = {
    "tpu-v5p-slice": SliceQuota("TPU-V5P-per-project-region", "PREEMPTIBLE-TPU-V5P-per-project-region"),
    "tpu-v6e-slice": SliceQuota("TPUS-PER-TPU-FAMILY-per-project-region", "PREEMPTIBLE-TPU-V6E-per-project-region"),
}


def slice_quota(accelerator: str, region: str, capacity: str) -> Quota | None:
    """The quota that counts the chips of a slice in a region, bought as `capacity` says; None if it is not known."""
    if accelerator not in SLICE_QUOTAS or not is_counted(capacity):
        return None
    counted = SLICE_QUOTAS[accelerator]
    name = counted.preemptible if is_preemptible(capacity) else counted.on_demand
    family = {"tpu_family": "CT6E"} if name.startswith("TPUS-PER-TPU-FAMILY") else {}
    return Quota("compute.googleapis.com", name, {"region": region, **family})
