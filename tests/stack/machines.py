"""List the resources in the stack's Cloud TPU and Compute Engine with ordinary clients, without the code under test."""

from __future__ import annotations

from collections.abc import Iterator

from dropforge.base import names

from ..deployments import clients
from .targets import PARTS

ZONES = sorted({placement["zone"] for placement in PARTS["tpu_vm"]["placements"]})


def machines_of_run(project: str, run: str) -> list[str]:
    """Return the names of a run's queued resources, nodes and disks."""
    return [name for name, labels in _all(project) if labels.get(names.RUN_LABEL) == run]


def _all(project: str) -> Iterator[tuple[str, dict[str, str]]]:
    parent, tpu = f"projects/{project}/locations/-", clients.tpu()
    for queued in tpu.list_queued_resources(parent=parent):
        yield queued.name, dict(queued.tpu.node_spec[0].node.labels)
    for node in tpu.list_nodes(parent=parent):
        yield node.name, dict(node.labels)
    session, url = clients.compute()
    for zone in ZONES:
        zone_path = f"projects/{project}/zones/{zone}"
        for disk in session.get(f"{url}/{zone_path}/disks", timeout=60).json()["items"]:
            yield f"{zone_path}/disks/{disk['name']}", disk.get("labels", {})
