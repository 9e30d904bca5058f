"""The simulated Cloud DNS of chaos answers as the emulator does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests

from dropforge_local.chaos.dns import ROOT, Dns
from dropforge_local.chaos.faults import Strike
from dropforge_local.chaos.world import World

from .test_records import DOMAIN, NAME, emulator, record, zone

__all__ = ["emulator", "zone"]  # fixtures
ZONE = "projects/p/managedZones/names"
Send = Callable[..., requests.Response]
OTHER = f"other.{DOMAIN}."
SCRIPT: list[dict[str, Any]] = [
    {"additions": [record()]},
    {"additions": [record("10.0.0.2")]},
    {"deletions": [record("10.0.0.2")], "additions": [record("10.0.0.3")]},
    {"deletions": [record(ttl=60)]},
    {"deletions": [record(name=OTHER)]},
    {"deletions": [record()], "additions": [record("10.0.0.4"), record(name=OTHER)]},
    {"deletions": [record(name=OTHER)], "additions": [record("10.0.0.5")]},
    {},
    {"additions": [record("not an address", name=OTHER)]},
    {"additions": [record(name="elsewhere.example.com.")]},
    {"deletions": [record(name=OTHER)]},
]
LOOKS: list[dict[str, str]] = [{}, {"name": NAME, "type": "A"}, {"name": OTHER, "type": "A"}, {"name": NAME}]


def answers(send: Send) -> list[Any]:
    """What the script changes and sees: statuses, reasons and records, without ids and times."""
    told: list[Any] = []
    for body in SCRIPT:
        changed = send("POST", "changes", None, body)
        error = changed.json().get("error", {})
        told.append((changed.status_code, error.get("code"), [each["reason"] for each in error.get("errors", ())]))
        if changed.ok:
            made = send("GET", f"changes/{changed.json()['id']}", None, None).json()
            told.append((made["id"] == changed.json()["id"], made["status"] in ("pending", "done")))
        for query in LOOKS:
            told.append(listed(send, query))
    return [*told, send("GET", "rrsets", {"type": "A"}, None).status_code]


def listed(send: Send, query: dict[str, str]) -> list[Any]:
    """All pages of a list."""
    page = send("GET", "rrsets", query, None).json()
    following = {**query, "pageToken": page["nextPageToken"]} if "nextPageToken" in page else None
    return [*page["rrsets"], *(listed(send, following) if following else [])]


@pytest.mark.usefixtures("emulator")
def test_the_simulation_and_the_emulator_answer_alike(zone: str) -> None:
    simulated = Dns(World(0, Strike(0, "")), ZONE, DOMAIN)

    def simulate(verb: str, path: str, query: Any, body: Any) -> requests.Response:
        answer: requests.Response = simulated.request(verb, f"{ROOT}/{ZONE}/{path}", query, body, 60)
        return answer

    def ask(verb: str, path: str, query: Any, body: Any) -> requests.Response:
        return requests.request(verb, f"{zone}/{path}", params=query, json=body, timeout=60)

    assert answers(simulate) == answers(ask)
