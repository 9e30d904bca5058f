"""The permission that each method needs: https://cloud.google.com/compute/docs/reference/rest/v1/disks (2026-11-23)."""

from __future__ import annotations

from ..kit import access

NEEDS = access.table(
    """
    insert_disk compute.disks.create parent
    list_disks compute.disks.list parent
    get_disk compute.disks.get name
    delete_disk compute.disks.delete name
    aggregated_list_disks compute.disks.list parent
    get_operation compute.zoneOperations.get name
    wait_operation compute.zoneOperations.get name
    """
)
SET_LABELS = "compute.disks.setLabels"  # for a disk that has labels from its creation
