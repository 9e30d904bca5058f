"""Triggers end to end: a change or a message reaches a real functions-framework function as a CloudEvent."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import pytest
import requests
from tests.patience import PATIENCE_SECONDS

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.errors import ApiError
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.eventarc import EventarcRouter, Trigger
from dropforge_local.emulators.pubsub import DeliveryFaults, PubSubEmulator

T = TypeVar("T")
FINALIZED = "google.cloud.storage.object.v1.finalized"
DELETED = "google.cloud.storage.object.v1.deleted"
PUBLISHED = "google.cloud.pubsub.topic.v1.messagePublished"
REQUESTS = "projects/test-project/topics/requests"
FUNCTIONS = """
import functions_framework, json, os

@functions_framework.cloud_event
def record(event):
    with open(os.environ["RECORD"], "a") as record:
        record.write(json.dumps({"attributes": dict(event.get_attributes()), "data": event.get_data()}) + "\\n")
    if os.path.exists(os.environ["RECORD"] + ".broken"):
        raise RuntimeError("broken on purpose")
"""


@dataclass(frozen=True)
class Change:
    event: str
    resource: dict[str, Any]


def change(event: str = "finalized", name: str = "specs/a.json", bucket: str = "specs") -> Change:
    resource = {"bucket": bucket, "name": name, "generation": "12345", "metageneration": "1", "size": "7"}
    return Change(event, resource)


@dataclass
class Stack:
    """Pub/Sub and Eventarc on one database, restartable."""

    path: Path

    def __enter__(self) -> Stack:
        self.background = BackgroundServer(self._build)
        self.server = self.background.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.background.__exit__(*exc)

    def _build(self) -> list[Any]:
        self.db = Database(self.path)
        self.pubsub = PubSubEmulator(self.db, SystemClock(), lambda audience, email: f"token-for-{audience}")
        self.eventarc = EventarcRouter(self.pubsub, "test-project", "us-central1", minimum_backoff_seconds=0.2)
        return [self.pubsub, self.eventarc]

    def call(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return self.background.call(run())

    def ensure(self, url: str, event_type: str = FINALIZED, **config: Any) -> None:
        filters = {"topic": REQUESTS} if event_type == PUBLISHED else {"bucket": "specs"}
        trigger = Trigger(config.pop("name", "on-spec"), event_type, filters, url, **config)
        self.call(lambda: self.eventarc.ensure_trigger(trigger))

    def change(self, *changes: Change) -> None:
        for change in changes:
            self.call(partial(self.eventarc.on_object_change, change))

    def waiting(self) -> int:
        row = self.call(lambda: self.db.connection.execute("SELECT COUNT(*) FROM pubsub_deliveries").fetchone())
        return int(row[0])


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path / "state.db") as stack:
        yield stack


@dataclass
class Endpoint:
    url: str
    requests: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    status: int = 204


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.requests.append(({key.lower(): value for key, value in self.headers.items()}, body))
            self.send_response(state.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state = Endpoint(f"http://127.0.0.1:{server.server_address[1]}/on_spec")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@dataclass
class Function:
    url: str
    record: Path

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []

    def break_(self, broken: bool) -> None:
        switch = Path(f"{self.record}.broken")
        switch.touch() if broken else switch.unlink()


@pytest.fixture
def function(tmp_path: Path) -> Iterator[Function]:
    """A functions-framework process, as deployed."""
    source = tmp_path / "main.py"
    source.write_text(FUNCTIONS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["--target=record", f"--source={source}", "--host=127.0.0.1", f"--port={port}"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "functions_framework", *command],
        env={**os.environ, "RECORD": str(tmp_path / "record"), "THREADS": "8"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    eventually(lambda: listens(port))
    yield Function(f"http://127.0.0.1:{port}/", tmp_path / "record")
    process.terminate()
    process.wait(60)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def eventually(condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.01)
    return value


def test_function_receives_a_storage_event(stack: Stack, function: Function) -> None:
    stack.ensure(function.url)
    stack.change(change(bucket="others"), change("deleted"), change())
    (event,) = eventually(function.events)
    attributes = event["attributes"]
    assert attributes["type"] == FINALIZED
    assert attributes["source"] == "//storage.googleapis.com/projects/_/buckets/specs"
    assert (attributes["subject"], attributes["bucket"]) == ("objects/specs/a.json", "specs")
    assert attributes["specversion"] == "1.0"
    assert event["data"] == change().resource
    eventually(lambda: stack.waiting() == 0)


def test_function_receives_a_published_message(stack: Stack, function: Function) -> None:
    stack.call(lambda: stack.pubsub.create_topic(REQUESTS))
    stack.ensure(function.url, PUBLISHED)
    sent = stack.call(lambda: stack.pubsub.publish(REQUESTS, b'{"name": "x"}', {"idempotency_key": "k"}))
    (event,) = eventually(function.events)
    attributes, message = event["attributes"], event["data"]["message"]
    assert (attributes["type"], attributes["source"]) == (PUBLISHED, f"//pubsub.googleapis.com/{REQUESTS}")
    assert attributes["id"] == message["messageId"] == sent
    assert attributes["time"] == message["publishTime"]
    assert base64.b64decode(message["data"]) == b'{"name": "x"}'
    assert message["attributes"] == {"idempotency_key": "k"}
    assert event["data"]["subscription"].startswith("projects/test-project/subscriptions/eventarc-us-central1-on-spec-")


def test_failing_function_gets_the_same_event_again(stack: Stack, function: Function) -> None:
    function.break_(True)
    stack.ensure(function.url)
    stack.change(change())
    eventually(lambda: len(function.events()) >= 2)
    function.break_(False)
    eventually(lambda: stack.waiting() == 0)
    assert len({event["attributes"]["id"] for event in function.events()}) == 1


def test_request_is_binary_mode_json_with_a_token_for_the_destination(stack: Stack, endpoint: Endpoint) -> None:
    stack.ensure(endpoint.url)
    stack.change(change())
    ((headers, body),) = eventually(lambda: endpoint.requests)
    assert headers["content-type"] == "application/json"
    assert headers["authorization"] == f"Bearer token-for-{endpoint.url}"
    assert headers["ce-time"].endswith("Z")
    assert body["generation"] == "12345"


@pytest.mark.parametrize("event", ["finalized", "deleted", "archived", "metadataUpdated"])
def test_every_storage_event_has_its_trigger(stack: Stack, endpoint: Endpoint, event: str) -> None:
    stack.ensure(endpoint.url, f"google.cloud.storage.object.v1.{event}")
    stack.change(*(change(other) for other in ("finalized", "deleted", "archived", "metadataUpdated")))
    eventually(lambda: endpoint.requests and stack.waiting() == 0)
    assert [headers["ce-type"].rpartition(".")[2] for headers, _ in endpoint.requests] == [event]


@pytest.mark.parametrize("name", ["x" * 1024, "a b/日本 %.json", 'q"uote\r\nHost: evil'])
def test_events_carry_object_names_of_all_kinds(stack: Stack, endpoint: Endpoint, name: str) -> None:
    stack.ensure(endpoint.url)
    stack.change(change(name=name))
    ((headers, body),) = eventually(lambda: endpoint.requests)
    assert body["name"] == name
    assert unquote(headers["ce-subject"]) == f"objects/{name}"


def test_event_is_part_of_the_transaction_that_changes_the_object(stack: Stack, endpoint: Endpoint) -> None:
    stack.ensure(endpoint.url)

    def roll_back() -> None:
        with contextlib.suppress(ZeroDivisionError), stack.db.transaction():
            stack.eventarc.on_object_change(change(name="never"))
            raise ZeroDivisionError

    stack.call(roll_back)
    stack.change(change(name="stored"))
    eventually(lambda: endpoint.requests and stack.waiting() == 0)
    assert [body["name"] for _, body in endpoint.requests] == ["stored"]


def test_undelivered_event_survives_a_restart_and_goes_to_the_new_destination(
    tmp_path: Path, endpoint: Endpoint
) -> None:
    with Stack(tmp_path / "state.db") as before:
        before.ensure("http://127.0.0.1:9/nobody")
        before.change(change())
        assert before.waiting() == 1
    with Stack(tmp_path / "state.db") as after:
        after.ensure(endpoint.url)
        eventually(lambda: endpoint.requests and after.waiting() == 0)
    assert len(endpoint.requests) == 1


def test_ensure_trigger_is_idempotent_and_listed(stack: Stack, endpoint: Endpoint) -> None:
    stack.ensure(endpoint.url)
    url = f"{stack.server.url}/v1/projects/test-project/locations/us-central1/triggers"
    (first,) = requests.get(url, timeout=60).json()["triggers"]
    stack.ensure(endpoint.url)
    assert requests.get(f"{url}/on-spec", timeout=60).json() == first
    assert first["eventFilters"] == [
        {"attribute": "type", "value": FINALIZED},
        {"attribute": "bucket", "value": "specs"},
    ]
    assert first["destination"] == {"httpEndpoint": {"uri": endpoint.url}}
    assert requests.get(f"{url}/none", timeout=60).status_code == 404
    stack.change(change())
    eventually(lambda: endpoint.requests and stack.waiting() == 0)
    assert len(endpoint.requests) == 1


def test_changed_event_type_replaces_the_trigger(stack: Stack, endpoint: Endpoint) -> None:
    stack.ensure(endpoint.url)
    stack.ensure(endpoint.url, DELETED)
    stack.change(change("finalized"), change("deleted"))
    eventually(lambda: endpoint.requests and stack.waiting() == 0)
    assert [headers["ce-type"] for headers, _ in endpoint.requests] == [DELETED]


def test_dead_letter_topic_receives_an_event_refused_five_times(stack: Stack, endpoint: Endpoint) -> None:
    graveyard = "projects/test-project/topics/graveyard"
    subscription = "projects/test-project/subscriptions/graveyard"
    stack.call(lambda: stack.pubsub.create_topic(graveyard))
    stack.call(lambda: stack.pubsub.create_subscription(subscription, graveyard))
    endpoint.status = 500
    stack.ensure(endpoint.url, dead_letter_topic=graveyard)
    stack.change(change())
    query = "SELECT attributes FROM pubsub_messages WHERE topic = ?"
    rows = eventually(lambda: stack.call(lambda: stack.db.connection.execute(query, (graveyard,)).fetchall()))
    assert json.loads(rows[0][0])["ce-subject"] == "objects/specs/a.json"
    assert len(endpoint.requests) == 5


def test_duplicate_fault_repeats_the_event_id(stack: Stack, endpoint: Endpoint) -> None:
    stack.ensure(endpoint.url)

    def break_delivery() -> None:
        stack.pubsub.faults = DeliveryFaults(seed=3, duplicate=1.0, drop_first=0.3, reorder=0.5)

    stack.call(break_delivery)
    stack.change(*(change(name=f"specs/{number}.json") for number in range(10)))
    eventually(lambda: stack.waiting() == 0)
    ids = [headers["ce-id"] for headers, _ in endpoint.requests]
    assert len(set(ids)) == 10
    assert len(ids) > 10


@pytest.mark.parametrize(
    ("trigger", "status"),
    [
        (Trigger("t", "google.cloud.audit.log.v1.written", {}, "http://h/"), "UNIMPLEMENTED"),
        (Trigger("t", FINALIZED, {"bucket": "b", "name": "x*"}, "http://h/"), "INVALID_ARGUMENT"),
        (Trigger("t", FINALIZED, {}, "http://h/"), "INVALID_ARGUMENT"),
        (Trigger("t", FINALIZED, {"bucket": "b"}, "no url"), "INVALID_ARGUMENT"),
        (Trigger("t", PUBLISHED, {"topic": "projects/p/topics/missing"}, "http://h/"), "NOT_FOUND"),
    ],
)
def test_invalid_trigger_is_refused_and_leaves_no_subscription(stack: Stack, trigger: Trigger, status: str) -> None:
    def ensure() -> str:
        with pytest.raises(ApiError) as refused:
            stack.eventarc.ensure_trigger(trigger)
        return refused.value.status

    assert stack.call(ensure) == status
    query = "SELECT (SELECT COUNT(*) FROM pubsub_subscriptions) + (SELECT COUNT(*) FROM pubsub_topics)"
    assert stack.call(lambda: stack.db.connection.execute(query).fetchone()[0]) == 0
