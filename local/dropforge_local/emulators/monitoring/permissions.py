"""The permission of the method: https://cloud.google.com/monitoring/access-control (2026-11-24)."""

from __future__ import annotations

from ..kit import access

NEEDS = access.table(
    """
    list_time_series monitoring.timeSeries.list -
    list_alerts monitoring.alerts.list -
    """
)
