"""What the emulated Cloud DNS changes, lists and refuses, asked over HTTP; and where connections to a name go."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Emulator
from dropforge_local.emulators.dns import DnsEmulator

from ...patience import until

DOMAIN = "models.example.internal"
NAME = f"sql.us-west4-a.{DOMAIN}."


def record(address: str = "10.0.0.1", **changes: Any) -> dict[str, Any]:
    return {"name": NAME, "type": "A", "ttl": 5, "rrdatas": [address], **changes}


@pytest.fixture
def emulator(tmp_path: Path) -> Iterator[str]:
    def emulators() -> list[Emulator]:
        return [DnsEmulator(Database(tmp_path / "state.db"), SystemClock(), "projects/p/managedZones/names", DOMAIN)]

    with BackgroundServer(emulators) as server:
        yield server.url


@pytest.fixture
def zone(emulator: str) -> str:
    return f"{emulator}/dns/v1/projects/p/managedZones/names"


def change(zone: str, *, add: Any = (), delete: Any = ()) -> requests.Response:
    body = {"additions": list(add), "deletions": list(delete)}
    return requests.post(f"{zone}/changes", json=body, timeout=60)


def records(zone: str, **query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = requests.get(f"{zone}/rrsets", params=query, timeout=60).json()["rrsets"]
    return found


def test_a_change_moves_a_name_from_one_address_to_the_other(zone: str) -> None:
    made = change(zone, add=[record()]).json()
    assert (made["kind"], made["status"]) == ("dns#change", "pending")
    until(lambda: requests.get(f"{zone}/changes/{made['id']}", timeout=60).json()["status"] == "done")
    assert change(zone, delete=[record()], add=[record("10.0.0.2")]).ok
    assert records(zone, name=NAME, type="A") == [{"kind": "dns#resourceRecordSet", **record("10.0.0.2")}]
    assert records(zone, name=f"other.{DOMAIN}.", type="A") == []
    assert change(zone, delete=[record("10.0.0.2")]).ok
    assert records(zone) == []


@pytest.mark.parametrize(
    ("parts", "status", "reason"),
    [
        ({"delete": [record("10.0.0.2")], "add": [record("10.0.0.3")]}, 412, "conditionNotMet"),
        ({"delete": [record(ttl=60)]}, 412, "conditionNotMet"),
        ({"delete": [record(name=f"other.{DOMAIN}.")]}, 404, "notFound"),
        ({"add": [record("10.0.0.2")]}, 409, "alreadyExists"),
        ({"add": [record(name=f"other.{DOMAIN}."), record("10.0.0.2")]}, 409, "alreadyExists"),
    ],
)
def test_a_change_of_what_is_not_so_any_more_changes_nothing(
    zone: str, parts: dict[str, Any], status: int, reason: str
) -> None:
    change(zone, add=[record()])
    refused = change(zone, **parts)
    assert (refused.status_code, refused.json()["error"]["errors"][0]["reason"]) == (status, reason)
    assert [found["rrdatas"] for found in records(zone)] == [["10.0.0.1"]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": f"sql.{DOMAIN}"},
        {"name": "sql.example.com."},
        {"name": f"sql{DOMAIN}."},
        {"name": f"Sql.{DOMAIN}."},
        {"ttl": -1},
        {"ttl": "5"},
        {"rrdatas": []},
        {"rrdatas": ["10.0.0.256"]},
        {"rrdatas": ["10.0.0.1", "10.0.0.1"]},
        {"weight": 1},
    ],
)
def test_what_cloud_dns_refuses_is_refused(zone: str, wrong: dict[str, Any]) -> None:
    assert change(zone, add=[record(**wrong)]).status_code == 400
    assert records(zone) == []


def test_only_the_zone_of_terraform_exists(zone: str) -> None:
    elsewhere = zone.replace("/names", "/other")
    assert change(elsewhere, add=[record()]).status_code == 404
    assert requests.get(f"{elsewhere}/rrsets", timeout=60).status_code == 404
    assert change(zone).status_code == 400
    assert requests.get(f"{zone}/rrsets", params={"type": "A"}, timeout=60).status_code == 400
    assert requests.get(f"{zone}/changes/99", timeout=60).status_code == 404


def test_pages_have_every_record_once(zone: str) -> None:
    made = [record(name=f"e{number}.{DOMAIN}.") for number in range(5)]
    change(zone, add=made)
    found: list[str] = []
    token = ""
    while True:
        page = requests.get(f"{zone}/rrsets", params={"maxResults": "2", "pageToken": token}, timeout=60).json()
        found += [each["name"] for each in page["rrsets"]]
        if not (token := page.get("nextPageToken", "")):
            break
    assert found == [each["name"] for each in made]


def test_a_connection_to_a_name_reaches_its_address_and_the_name_keeps_its_port(emulator: str, zone: str) -> None:
    with answering(b"first") as (address, port):
        authority = where(emulator, port)
        assert asked(authority) == b"", "the name does not exist yet"
        change(zone, add=[record(address, ttl=0)])
        assert asked(authority) == b"first"
        with answering(b"second", "127.0.0.2", port):
            change(zone, delete=[record(address, ttl=0)], add=[record("127.0.0.2", ttl=0)])
            assert asked(authority) == b"second"
        assert where(emulator, port) == authority


def where(emulator: str, port: int) -> str:
    query = {"host": NAME.rstrip("."), "port": str(port)}
    return str(requests.get(f"{emulator}/dns/_authority", params=query, timeout=60).json()["authority"])


def asked(authority: str) -> bytes:
    host, _, port = authority.partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(100)


class answering:
    """A server that sends `text` to each connection and closes the connection. Yields its address and port."""

    def __init__(self, text: bytes, address: str = "127.0.0.1", port: int = 0) -> None:
        self._text = text
        self._server = socket.create_server((address, port))

    def __enter__(self) -> tuple[str, int]:
        threading.Thread(target=self._serve, daemon=True).start()
        address, port = self._server.getsockname()
        return address, port

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with closing(connection):
                connection.sendall(self._text)
