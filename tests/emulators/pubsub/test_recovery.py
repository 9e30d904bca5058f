"""Kill the emulator's process at any moment and start it again on the same database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.api_core import exceptions
from google.pubsub_v1 import PublisherClient as GapicPublisher  # publishes without batching or retries

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import Server
from dropforge_local.emulators.pubsub import PubSubEmulator

from ..own_process import OwnProcess, Ready
from .conftest import Endpoint, PubSub, eventually


async def serve(path: Path, ready: Ready) -> None:
    server = Server([PubSubEmulator(Database(path), SystemClock())])
    await server.start()
    ready(server.grpc_address)
    await asyncio.Event().wait()


class Process:
    """An emulator in its own process; `start` returns clients of the new process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clients: list[PubSub] = []
        self.process: OwnProcess | None = None

    def start(self) -> PubSub:
        self.process = OwnProcess(serve, self.path)
        self.clients.append(PubSub(self.process.said))
        return self.clients[-1]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path / "state.db")
    yield process
    process.kill()
    for client in process.clients:
        client.close()


def test_acked_messages_stay_acked_and_unacked_messages_are_redelivered(process: Process) -> None:
    before = process.start()
    topic = before.topic()
    subscription = before.subscription(topic, ack_deadline_seconds=10)
    sent = before.publish(topic, *(b"%d" % number for number in range(6)))
    received = before.pull_until(subscription, 4)
    before.ack(subscription, received[:2])
    before.nack(subscription, received[2:])
    process.kill()
    after = process.start()
    again = after.pull_until(subscription, 4)
    assert sorted(item.message.message_id for item in again) == sorted(sent[2:])


def test_ack_id_from_before_the_crash_still_acks(process: Process) -> None:
    before = process.start()
    topic = before.topic()
    subscription = before.subscription(topic)
    before.publish(topic, b"x")
    received = before.pull_until(subscription, 1)
    process.kill()
    after = process.start()
    assert after.pull(subscription) == []  # still leased
    after.ack(subscription, received)
    after.nack(subscription, received)
    assert after.pull(subscription) == []


@pytest.mark.slow
def test_no_acknowledged_publish_is_lost_to_kills_under_load(process: Process) -> None:
    client = process.start()
    topic = client.topic()
    subscription = client.subscription(topic)
    sent: set[str] = set()

    def publish(client: PubSub) -> None:
        request = {"topic": topic, "messages": [{"data": b"x"}]}
        try:
            while True:
                sent.update(GapicPublisher.publish(client.publisher, request=request, retry=None).message_ids)
        except exceptions.GoogleAPICallError:
            return

    for round_ in range(1, 4):
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(publish, client) for _ in range(2)]
            eventually(lambda enough: len(sent) >= enough, round_ * 60)
            process.kill()
            assert [future.result(20) for future in futures] == [None, None]
        client = process.start()
    received: set[str] = set()  # may exceed `sent`: a kill can hide that a publish succeeded

    def all_received() -> bool:
        received.update(item.message.message_id for item in client.pull(subscription))
        return sent <= received

    eventually(all_received)


def test_full_disk_is_reported_and_loses_no_message(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic = pubsub.topic()
    pubsub.subscription(topic, push_config={"push_endpoint": endpoint.url})
    endpoint.answer = lambda request: 500
    pubsub.publish(topic, b"before")
    eventually(lambda: endpoint.requests)
    ((pages,),) = pubsub.query("PRAGMA page_count")
    pubsub.query(f"PRAGMA max_page_count = {pages}")
    request = {"topic": topic, "messages": [{"data": b"x" * 5_000_000}]}
    with pytest.raises(exceptions.ResourceExhausted, match="disk is full"):
        GapicPublisher.publish(pubsub.publisher, request=request, retry=None)
    pubsub.query("PRAGMA max_page_count = 1000000")
    endpoint.answer = lambda request: 200
    pubsub.publish(topic, b"after")
    eventually(lambda: pubsub.query("SELECT COUNT(*) FROM pubsub_deliveries") == [(0,)])
    assert {b"before", b"after"} <= set(endpoint.bodies())
