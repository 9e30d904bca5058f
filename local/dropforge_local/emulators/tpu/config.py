"""Facts that differ between zones, projects and machines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from dropforge_local.base.lifetimes import TOKEN_SECONDS
from dropforge_local.base.ports import HOST

# Topologies by number of chips.
_SQUARE = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBE = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}


@dataclass(frozen=True)
class Generation:
    """A TPU generation: its topologies by number of chips, its zones, and the runtimes that boot on it."""

    prefix: str
    config_type: str
    zones: frozenset[str]
    runtimes: tuple[str, ...]
    quota: str  # the name in quota errors, by tier
    topologies: Mapping[int, str] = field(default_factory=lambda: MappingProxyType(_SQUARE))
    cores_per_chip: int = 1
    chips_per_host: int = 8

    def accelerator_type(self, chips: int) -> str:
        return f"{self.prefix}-{chips * self.cores_per_chip}"


# https://cloud.google.com/tpu/docs/regions-zones, .../v5e, .../v5p, .../v6e and .../runtimes
GENERATIONS = (
    Generation(
        prefix="v5litepod",
        config_type="V5LITE_POD",
        zones=frozenset(["us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a", "europe-west4-b"]),
        runtimes=("v2-alpha-tpuv5-lite",),
        quota="TPUV5s{tier}Litepod",
    ),
    Generation(
        prefix="v5p",
        config_type="V5P",
        zones=frozenset(["us-east5-a", "us-central1-a", "europe-west4-b"]),
        runtimes=("v2-alpha-tpuv5",),
        quota="TPUV5P{tier}",
        topologies=MappingProxyType(_CUBE),
        cores_per_chip=2,
        chips_per_host=4,
    ),
    Generation(
        prefix="v6e",
        config_type="V6E",
        zones=frozenset(["us-central1-b", "us-east1-d", "us-east5-a", "us-east5-b", "europe-west4-a"]),
        runtimes=("v2-alpha-tpuv6e",),
        quota="TPUV6E{tier}",
    ),
)
ANY_RUNTIME = ("tpu-ubuntu2204-base",)  # boots on every generation


@dataclass(frozen=True, kw_only=True)
class TpuConfig:
    """Timings and quotas of the emulated Cloud TPU. Steps that take minutes in the cloud take seconds here."""

    create_seconds: float = 1.0  # from a node's creation until it is READY
    delete_seconds: float = 0.3
    queue_seconds: float = 0.3  # between two states of a queued resource
    grace_seconds: float = 30.0  # between SIGTERM and SIGKILL: https://cloud.google.com/compute/docs/instances/spot
    final_seconds: float = 2.0  # of a shutdown: from the end of the containers to SIGTERM for what is left
    reboot_seconds: float = 1.0
    minute_seconds: float = 60.0  # a minute in the delay of `shutdown -P +MINUTES`
    maintenance_seconds: float = 2.0  # between the notice in the metadata and the reboot
    chips_per_zone: int = 32  # per generation and tier, unless the fault `quota` says otherwise
    metadata_ports: range = range(15000, 16000)
    token_seconds: int = TOKEN_SECONDS - 1  # what the metadata server says of a new access token
    kept_boots: int = 100  # ended machines whose serial output stays readable
    generations: tuple[Generation, ...] = field(default_factory=lambda: GENERATIONS)

    def address(self, metadata_port: int) -> str:
        """A machine's address. Each machine has its own on Linux, so that several machines can serve at the same port.

        Only Linux answers on every address of 127.0.0.0/8; on other systems, all machines share 127.0.0.1.
        """
        index = metadata_port - self.metadata_ports.start
        return f"127.77.{index // 250}.{index % 250 + 1}" if sys.platform == "linux" else HOST
