"""Address records of Cloud DNS, changed and listed through the emulated API by several callers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from dropforge.cloud import dns
from dropforge.cloud.context import Cloud
from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.dns import DnsEmulator

from ..deployments import SETTINGS, TestClock, cloud_with

EMULATOR = "dropforge_local.emulators.dns.emulator"
SETTINGS_WITH_ZONE = replace(SETTINGS, endpoint_domain="models.example.internal", endpoint_zone="names")
SQL = dns.record_name(SETTINGS_WITH_ZONE, "sql", "us-west4-a")


class Hours(TestClock):
    """A clock that nobody waits for: `sleep` moves it on."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    monkeypatch.setattr(f"{EMULATOR}.PENDING_SECONDS", 0.0)
    zone = f"projects/{SETTINGS.project}/managedZones/names"

    def emulators() -> list[DnsEmulator]:
        domain = SETTINGS_WITH_ZONE.endpoint_domain
        return [DnsEmulator(Database(tmp_path / "state.db"), SystemClock(), zone, domain)]

    with BackgroundServer(emulators) as server, requests.Session() as session:
        yield replace(cloud_with(SETTINGS_WITH_ZONE, dns=(session, f"{server.url}/dns/v1")), clock=Hours())


def addresses(cloud: Cloud) -> list[str]:
    found = dns.find_record(cloud, SQL)
    return [] if found is None else list(found["rrdatas"])


def test_a_change_that_another_caller_has_overtaken_changes_nothing(cloud: Cloud) -> None:
    assert dns.change_record(cloud, SQL, None, "10.0.0.1")
    read = dns.find_record(cloud, SQL)
    assert dns.change_record(cloud, SQL, read, "10.0.0.2")  # by the other caller
    assert not dns.change_record(cloud, SQL, read, "10.0.0.3")
    assert not dns.change_record(cloud, SQL, read, "")
    assert not dns.change_record(cloud, SQL, None, "10.0.0.4")
    assert addresses(cloud) == ["10.0.0.2"]
    assert dns.change_record(cloud, SQL, dns.find_record(cloud, SQL), "")
    assert not dns.change_record(cloud, SQL, read, "10.0.0.3")
    assert addresses(cloud) == []


def test_a_name_has_moved_only_once_the_change_is_done(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{EMULATOR}.PENDING_SECONDS", 3600.0)
    assert not dns.change_record(cloud, SQL, None, "10.0.0.1")
    assert cloud.clock.monotonic() >= dns.WAIT_SECONDS


def test_the_names_of_the_whole_zone_are_listed(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{EMULATOR}.MAX_RESULTS", 2)
    wanted = [dns.record_name(SETTINGS_WITH_ZONE, f"e-{number}", "us-west4-a") for number in range(5)]
    for record in wanted:
        assert dns.change_record(cloud, record, None, "10.0.0.1")
    assert [each.name for each in dns.list_records(cloud)] == wanted  # type: ignore[union-attr]
