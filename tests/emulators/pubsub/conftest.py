"""A Pub/Sub emulator on a virtual clock or the wall clock, with Google's clients connected to it."""

from __future__ import annotations

import base64
import itertools
import json
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.api_core.gapic_v1.method import DEFAULT
from google.cloud import pubsub_v1
from tests.patience import PATIENCE_SECONDS

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer, Server
from dropforge_local.emulators.pubsub import PubSubEmulator
from workflows_engine import VirtualClock

PROJECT = "projects/test-project"


@dataclass
class PubSub:
    """The clients, and short forms of their calls. `retry=None` shows every failure."""

    address: str
    server: Server | None = None
    background: BackgroundServer | None = None
    emulator: PubSubEmulator | None = None
    clock: VirtualClock | None = None
    names: Iterator[int] = field(default_factory=itertools.count)
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def __post_init__(self) -> None:
        os.environ["PUBSUB_EMULATOR_HOST"] = self.address
        try:
            self.publisher = pubsub_v1.PublisherClient(
                batch_settings=pubsub_v1.types.BatchSettings(max_messages=1),
                publisher_options=pubsub_v1.types.PublisherOptions(enable_message_ordering=True),
            )
            self.subscriber = pubsub_v1.SubscriberClient()
        finally:
            del os.environ["PUBSUB_EMULATOR_HOST"]

    def close(self) -> None:
        self.publisher.stop()
        self.publisher.transport.close()
        self.subscriber.close()

    def topic(self, **config: Any) -> str:
        name = f"{PROJECT}/topics/topic-{self.run}-{next(self.names)}"
        self.publisher.create_topic(request={"name": name, **config}, retry=None)
        return name

    def subscription(self, topic: str, **config: Any) -> str:
        name = f"{PROJECT}/subscriptions/sub-{self.run}-{next(self.names)}"
        self.subscriber.create_subscription(request={"name": name, "topic": topic, **config}, retry=None)
        return name

    def publish(self, topic: str, *data: bytes, ordering_key: str = "", **attributes: str) -> list[str]:
        return [
            self.publisher.publish(topic, item, ordering_key, retry=DEFAULT, **attributes).result(60) for item in data
        ]

    def pull(self, subscription: str, count: int = 100, wait: bool = False) -> list[Any]:
        request = {"subscription": subscription, "max_messages": count, "return_immediately": not wait}
        with warnings.catch_warnings():  # return_immediately is deprecated, but tests need it
            warnings.simplefilter("ignore", DeprecationWarning)
            return list(self.subscriber.pull(request=request, retry=None, timeout=60).received_messages)

    def pull_until(self, subscription: str, count: int, seconds: float = PATIENCE_SECONDS) -> list[Any]:
        """Pull until `count` messages have arrived, in any number of answers."""
        received: list[Any] = []
        deadline = time.monotonic() + seconds
        while len(received) < count and time.monotonic() < deadline:
            received += self.pull(subscription, count - len(received), wait=True)
        assert len(received) == count
        return received

    def ack(self, subscription: str, received: list[Any]) -> None:
        request = {"subscription": subscription, "ack_ids": [item.ack_id for item in received]}
        self.subscriber.acknowledge(request=request, retry=None)

    def nack(self, subscription: str, received: list[Any]) -> None:
        ids = [item.ack_id for item in received]
        request = {"subscription": subscription, "ack_ids": ids, "ack_deadline_seconds": 0}
        self.subscriber.modify_ack_deadline(request=request, retry=None)

    def advance(self, seconds: float) -> None:
        """Move the virtual clock and run the timers that became due."""
        assert self.clock is not None
        assert self.background is not None
        clock = self.clock

        async def move() -> None:
            clock.advance(clock.now() + seconds)

        self.background.call(move())

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        assert self.background is not None
        assert self.emulator is not None
        database = self.emulator.db

        async def read() -> list[tuple[Any, ...]]:
            return [tuple(row) for row in database.connection.execute(sql)]

        return self.background.call(read())


def serve(clock: SystemClock | VirtualClock, path: Path) -> Iterator[PubSub]:
    built: list[PubSubEmulator] = []

    def build() -> list[PubSubEmulator]:
        built.append(PubSubEmulator(Database(path), clock, lambda audience, email: f"token-of-{email}-for-{audience}"))
        return built

    background = BackgroundServer(build)
    with background as server:
        virtual = clock if isinstance(clock, VirtualClock) else None
        client = PubSub(server.grpc_address, server, background, built[0], virtual)
        yield client
        client.close()


@pytest.fixture
def pubsub(tmp_path: Path) -> Iterator[PubSub]:
    """An emulator on the wall clock."""
    yield from serve(SystemClock(), tmp_path / "state.db")


@pytest.fixture
def timeless(tmp_path: Path) -> Iterator[PubSub]:
    """An emulator on a clock that only `advance` moves."""
    yield from serve(VirtualClock(), tmp_path / "state.db")


def eventually(condition: Callable[..., Any], *arguments: Any, seconds: float = PATIENCE_SECONDS) -> Any:
    """Poll until `condition(*arguments)` is true, and return its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition(*arguments)):
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.01)
    return value


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: bytes
    arrived: float

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value


@dataclass
class Endpoint:
    """Records requests. `answer(request)` returns the status and may be slow."""

    url: str = ""
    requests: list[Request] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)
    answer: Callable[[Request], int] = lambda request: 204
    in_flight: int = 0
    most_in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def bodies(self) -> list[bytes]:
        return [base64.b64decode(request.json["message"].get("data", "")) for request in list(self.requests)]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    state = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            request = Request(self.path, {k.lower(): v for k, v in self.headers.items()}, body, time.monotonic())
            with state.lock:
                state.requests.append(request)
                state.connections.add(self.client_address)
                state.in_flight += 1
                state.most_in_flight = max(state.most_in_flight, state.in_flight)
            status = state.answer(request)
            with state.lock:
                state.in_flight -= 1
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class HttpServer(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            pass  # the emulator closed the connection first

    server = HttpServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}/push"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()
