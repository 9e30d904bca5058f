"""The permissions that the methods need, with the header x-goog-user-project (2026-11-24):
https://cloud.google.com/stackdriver/docs/otlp/migrate-collector-to-otlp-exporters."""

from __future__ import annotations

from ..kit import access

NEEDS = access.table(
    """
    export_traces telemetry.traces.write -
    export_traces serviceusage.services.use -
    """
)
