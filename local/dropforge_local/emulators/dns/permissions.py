"""The permission that each method needs: https://cloud.google.com/dns/docs/access-control (2026-11-26)."""

from __future__ import annotations

from ..kit import access

NEEDS = access.table(
    """
    list_records dns.resourceRecordSets.list zone
    create_change dns.changes.create zone
    get_change dns.changes.get zone
    """
)
# A change also needs these, by what it does to record sets: one that is deleted and added again is updated.
ADDS, DELETES, UPDATES = (
    "dns.resourceRecordSets.create",
    "dns.resourceRecordSets.delete",
    "dns.resourceRecordSets.update",
)
