"""The permissions that each method needs: https://cloud.google.com/tpu/docs/tpu-iam (2026-11-23).

A queued resource needs what its nodes need: an assumption (docs/cloud-checklist.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..kit import access

NEEDS = access.table(
    """
    list_nodes tpu.nodes.list parent
    get_node tpu.nodes.get name
    create_node tpu.nodes.create parent
    delete_node tpu.nodes.delete name
    stop_node tpu.nodes.stop name
    start_node tpu.nodes.start name
    list_queued_resources tpu.nodes.list parent
    get_queued_resource tpu.nodes.get name
    create_queued_resource tpu.nodes.create parent
    delete_queued_resource tpu.nodes.delete name
    list_accelerator_types tpu.acceleratortypes.list parent
    get_accelerator_type tpu.acceleratortypes.get name
    list_runtime_versions tpu.runtimeversions.list parent
    get_runtime_version tpu.runtimeversions.get name
    get_operation tpu.operations.get name
    list_operations tpu.operations.list name
    delete_operation tpu.operations.delete name
    list_locations tpu.locations.list name
    get_location tpu.locations.get name
    """
)


def of_node(request: Any) -> Iterator[tuple[str, str]]:
    yield from _of(request.node, request.parent)


def of_queued(request: Any) -> Iterator[tuple[str, str]]:
    for spec in request.queued_resource.tpu.node_spec:
        yield from _of(spec.node, request.parent)


FURTHER = {"create_node": of_node, "create_queued_resource": of_queued}


def _of(node: Any, parent: str) -> Iterator[tuple[str, str]]:
    yield access.acts_as(node.service_account.email, parent.split("/")[1])
    for disk in node.data_disks:
        yield "compute.disks.use", disk.source_disk
