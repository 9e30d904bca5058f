"""What the sweep deletes of a suspended endpoint, whose name and machines a late call has made."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge.base import names
from dropforge.cloud.listing import Listed
from dropforge.endpoints.record import EndpointRecord
from dropforge.stages.sweep.named import _end_left

SERVICE = "projects/p/managedZones/z/rrsets/text.us-central1-a.models.internal./A"
MACHINE = f"projects/p/locations/us-central1-a/nodes/{names.named_revision('text', 1)}"


@pytest.mark.parametrize(("is_gone", "deleted"), [(True, [SERVICE, MACHINE]), (False, [SERVICE])])
def test_no_machine_ends_before_its_name(is_gone: bool, deleted: list[str]) -> None:
    """The address of a machine that has ended may belong to another machine of the network."""
    asked: list[str] = []

    def teardown(cloud: Any, kind: str, name: str) -> bool:
        asked.append(name)
        return is_gone

    now = datetime(2026, 1, 1, tzinfo=UTC)
    record = EndpointRecord(name="text", source="", type="tpu_vm", region="r", service=SERVICE, created=now)
    platforms = SimpleNamespace(owner=lambda kind: SimpleNamespace(teardown=teardown))
    endpoints = SimpleNamespace(record=lambda name: record)
    context: Any = SimpleNamespace(endpoints=endpoints, platforms=platforms, cloud=None, log=lambda *_, **__: None)
    _end_left(context, record, [Listed("kind", name, {}) for name in (MACHINE, SERVICE)])
    assert asked == deleted
