"""Checks and defaults of nodes and queued resources."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from google.cloud import tpu_v2

from dropforge_local.base.errors import ApiError

from ..kit.names import ID, invalid_label
from .config import ANY_RUNTIME, Generation, TpuConfig

DISK = re.compile(r"projects/([^/]+)/zones/([^/]+)/disks/([^/]+)")
METADATA_KEY = re.compile(r"[-_a-zA-Z0-9]{1,128}")
# https://cloud.google.com/compute/docs/metadata/setting-custom-metadata#limitations
MAX_VALUE_BYTES, MAX_METADATA_BYTES = 256 * 2**10, 512 * 2**10
OUTPUT_ONLY = ("state", "health", "network_endpoints", "symptoms", "queued_resource", "multislice_node", "id")
READ_WRITE = tpu_v2.AttachedDisk.DiskMode.READ_WRITE


@dataclass(frozen=True)
class Slice:
    """The chips behind an accelerator type."""

    generation: Generation
    chips: int

    @property
    def name(self) -> str:
        return self.generation.accelerator_type(self.chips)

    @property
    def topology(self) -> str:
        return self.generation.topologies[self.chips]


def slices(config: TpuConfig, zone: str) -> Iterable[Slice]:
    """Every accelerator type of a zone."""
    for generation in config.generations:
        if zone in generation.zones:
            yield from (Slice(generation, chips) for chips in generation.topologies)


def runtimes(config: TpuConfig, zone: str) -> list[str]:
    """Every runtime version of a zone."""
    own = [version for generation in config.generations if zone in generation.zones for version in generation.runtimes]
    return sorted([*own, *ANY_RUNTIME]) if own else []


def zones(config: TpuConfig) -> list[str]:
    return sorted({zone for generation in config.generations for zone in generation.zones})


def check_zone(zone: str, config: TpuConfig) -> None:
    if zone not in zones(config):
        raise ApiError(
            "NOT_FOUND", f"Location {zone!r} is not found or access is unauthorized; TPUs are in {zones(config)!r}"
        )


def check_id(field: str, value: str) -> None:
    if not ID.fullmatch(value):
        raise _refuse(
            f"{field} is {value!r}; expected lowercase letters, numbers and hyphens, a letter first, no hyphen last, "
            "at most 63 in all"
        )


def check_node(node: Any, project: str, zone: str, config: TpuConfig) -> None:
    """Raise INVALID_ARGUMENT for a node that Cloud TPU would refuse, UNIMPLEMENTED for a node that is not emulated."""
    wanted = slice_of(node, zone, config)
    if node.runtime_version not in (*wanted.generation.runtimes, *ANY_RUNTIME):
        # Stricter than the cloud, where a machine with the wrong runtime boots and detects no TPU.
        raise _refuse(
            f"Runtime version {node.runtime_version!r} does not fit {wanted.name}; "
            f"expected one of {[*wanted.generation.runtimes, *ANY_RUNTIME]!r}"
        )
    if wanted.chips > wanted.generation.chips_per_host:
        raise ApiError("UNIMPLEMENTED", f"{wanted.name} has several machines; the local stack emulates one per node")
    scheduling = node.scheduling_config
    if sum([scheduling.preemptible, scheduling.spot, scheduling.reserved]) > 1:
        raise _refuse("scheduling_config: at most one of preemptible, spot and reserved can be set")
    for disk in node.data_disks:
        match = DISK.fullmatch(disk.source_disk)
        if match is None or match[1] != project or match[2] != zone:
            raise _refuse(
                f"data_disks.source_disk is {disk.source_disk!r}; expected projects/{project}/zones/{zone}/disks/DISK"
            )
    _check_labels(dict(node.labels))
    _check_metadata(dict(node.metadata))


def slice_of(node: Any, zone: str, config: TpuConfig) -> Slice:
    """The slice that a node requests by accelerator_type or accelerator_config. Raises INVALID_ARGUMENT."""
    known = {part.name: part for part in slices(config, zone)}
    if node.HasField("accelerator_config"):
        wanted = node.accelerator_config
        if node.accelerator_type:
            raise _refuse("only one of accelerator_type and accelerator_config can be set")
        kind = tpu_v2.AcceleratorConfig.Type(wanted.type_).name
        for part in known.values():
            if (part.generation.config_type, part.topology) == (kind, wanted.topology):
                return part
        raise _refuse(f"accelerator_config {kind} {wanted.topology!r} is not available in zone {zone}")
    if node.accelerator_type not in known:
        raise _refuse(
            f"Accelerator type {node.accelerator_type!r} is not available in zone {zone}; "
            f"expected one of {sorted(known)!r}"
        )
    return known[node.accelerator_type]


def slice_of_existing(node: Any, zone: str, config: TpuConfig) -> Slice:
    """The slice of a stored node."""
    return next(part for part in slices(config, zone) if part.name == node.accelerator_type)


def complete(node: Any, name: str, config: TpuConfig) -> None:
    """Set the fields that the server sets in a new node, and clear the output-only fields."""
    _, project, _, zone, _, _ = name.split("/")
    for field in OUTPUT_ONLY:
        node.ClearField(field)
    wanted = slice_of(node, zone, config)
    node.name = name
    node.accelerator_type = wanted.name
    node.accelerator_config.type_ = tpu_v2.AcceleratorConfig.Type[wanted.generation.config_type]
    node.accelerator_config.topology = wanted.topology
    network = node.network_config
    network.network = network.network or f"projects/{project}/global/networks/default"
    region = zone.rsplit("-", 1)[0]
    network.subnetwork = network.subnetwork or f"projects/{project}/regions/{region}/subnetworks/default"
    node.service_account.email = node.service_account.email or f"{project}-compute@developer.gserviceaccount.com"
    if not node.service_account.scope:
        node.service_account.scope.append("https://www.googleapis.com/auth/cloud-platform")
    for disk in node.data_disks:
        disk.mode = disk.mode or READ_WRITE
    node.api_version = tpu_v2.Node.ApiVersion.V2


def check_queued(queued: Any, parent: str, config: TpuConfig) -> None:
    """Raise INVALID_ARGUMENT for a queued resource that Cloud TPU would refuse, or UNIMPLEMENTED."""
    _, project, _, zone = parent.split("/")
    specs = queued.tpu.node_spec
    if len(specs) != 1:
        raise _refuse(f"tpu.node_spec has {len(specs)} elements; expected exactly 1")
    spec = specs[0]
    if spec.parent != parent:
        raise _refuse(f"tpu.node_spec.parent is {spec.parent!r}; expected {parent!r}, as the queued resource's")
    if spec.WhichOneof("name_strategy") == "multislice_params":
        raise ApiError("UNIMPLEMENTED", "multislice_params are not emulated by the local stack; set node_id")
    check_id("tpu.node_spec.node_id", spec.node_id)
    policy = queued.queueing_policy.WhichOneof("start_timing_constraints")
    if policy not in (None, "valid_until_duration", "valid_until_time"):
        raise ApiError("UNIMPLEMENTED", f"queueing_policy.{policy} is not emulated by the local stack")
    if queued.WhichOneof("tier") == "spot" and queued.reservation_name:
        raise _refuse("reservation_name and spot exclude each other")
    check_node(spec.node, project, zone, config)


def _check_labels(labels: dict[str, str]) -> None:
    if wrong := invalid_label(labels):
        raise _refuse(
            f"label {wrong[0]!r}: {wrong[1]!r} is not valid; expected at most 63 lowercase letters, numbers, hyphens "
            "and underscores, a letter first in the key"
        )


def _check_metadata(metadata: dict[str, str]) -> None:
    for key, value in metadata.items():
        if not METADATA_KEY.fullmatch(key):
            raise _refuse(f"metadata key {key!r} is not valid; expected at most 128 letters, numbers, '-' and '_'")
        if len(value.encode()) > MAX_VALUE_BYTES:
            raise _refuse(f"the value of metadata key {key!r} has more than {MAX_VALUE_BYTES} bytes")
    if sum(len(key) + len(value.encode()) for key, value in metadata.items()) > MAX_METADATA_BYTES:
        raise _refuse(f"the metadata have more than {MAX_METADATA_BYTES} bytes in all")


def _refuse(message: str) -> ApiError:
    return ApiError("INVALID_ARGUMENT", message)
