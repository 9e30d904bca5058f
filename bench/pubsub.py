"""Pub/Sub: latency of push and streaming pull, bulk rates and idle CPU time, of an emulator in another process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web
from google.cloud import pubsub_v1
from google.pubsub_v1 import PublisherClient, PubsubMessage

SAMPLES = 200
BULK = 2000
PROJECT = "projects/bench"
MESSAGE = PubsubMessage(data=b"x" * 500)
SERVER = """
import asyncio, sys
from dropforge_local.base.db import Database
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.base.server import Server
from dropforge_local.base.clock import SystemClock

async def main():
    server = Server([PubSubEmulator(Database(sys.argv[1]), SystemClock())])
    await server.start()
    print(server.grpc_address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, _emulator(Path(folder)) as process, _receiver() as receiver:
        publisher, subscriber = pubsub_v1.PublisherClient(), pubsub_v1.SubscriberClient()
        try:
            _report("publish -> push request arriving", _push(publisher, subscriber, receiver))
            _report("publish -> streaming pull callback", _stream(publisher, subscriber))
            _report("publish (1 message, unary)", _publish(publisher))
            print(f"bulk: {_bulk(publisher, subscriber)}")
            print(f"idle with 200 push subscriptions: {_idle(publisher, subscriber, receiver, process)}")
        finally:
            publisher.stop()
            publisher.transport.close()
            subscriber.close()


class Receiver:
    """A push endpoint in a thread that records when each request arrives."""

    def __init__(self) -> None:
        self.url = ""
        self.arrived: list[float] = []
        self.event = threading.Event()

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        app = web.Application()
        app.router.add_post("/push", self._push)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/push"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    async def _push(self, request: web.Request) -> web.Response:
        self.arrived.append(time.perf_counter())
        self.event.set()
        await request.read()
        return web.Response(status=204)


def _push(publisher: Any, subscriber: Any, receiver: Receiver) -> list[float]:
    topic = _topic(publisher, "push")
    name = f"{PROJECT}/subscriptions/push"
    subscriber.create_subscription(
        request={"name": name, "topic": topic, "push_config": {"push_endpoint": receiver.url}}
    )
    samples = []
    for _ in range(SAMPLES):
        receiver.event.clear()
        started = time.perf_counter()
        PublisherClient.publish(publisher, topic=topic, messages=[MESSAGE])
        assert receiver.event.wait(10)
        samples.append(receiver.arrived[-1] - started)
    return samples


def _stream(publisher: Any, subscriber: Any) -> list[float]:
    topic = _topic(publisher, "stream")
    name = f"{PROJECT}/subscriptions/stream"
    subscriber.create_subscription(name=name, topic=topic)
    arrived: list[float] = []
    event = threading.Event()

    def receive(message: Any) -> None:
        arrived.append(time.perf_counter())
        event.set()
        message.ack()

    stream = subscriber.subscribe(name, receive)
    samples = []
    for _ in range(SAMPLES):
        event.clear()
        started = time.perf_counter()
        PublisherClient.publish(publisher, topic=topic, messages=[MESSAGE])
        assert event.wait(10)
        samples.append(arrived[-1] - started)
    stream.cancel()
    stream.result(10)
    return samples


def _publish(publisher: Any) -> list[float]:
    topic = _topic(publisher, "single")
    samples = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        PublisherClient.publish(publisher, topic=topic, messages=[MESSAGE])
        samples.append(time.perf_counter() - started)
    return samples


def _bulk(publisher: Any, subscriber: Any) -> str:
    topic = _topic(publisher, "bulk")
    name = f"{PROJECT}/subscriptions/bulk"
    subscriber.create_subscription(name=name, topic=topic)
    started = time.perf_counter()
    for _ in range(BULK // 100):
        PublisherClient.publish(publisher, topic=topic, messages=[MESSAGE] * 100)
    published = time.perf_counter() - started
    started, received = time.perf_counter(), 0
    while received < BULK:
        batch = subscriber.pull(subscription=name, max_messages=500).received_messages
        subscriber.acknowledge(subscription=name, ack_ids=[item.ack_id for item in batch])
        received += len(batch)
    pulled = time.perf_counter() - started
    return f"{BULK / published:,.0f} published/s (batches of 100), {BULK / pulled:,.0f} pulled and acked/s"


def _idle(publisher: Any, subscriber: Any, receiver: Receiver, process: psutil.Process) -> str:
    topic = _topic(publisher, "idle")
    for number in range(200):
        config = {"name": f"{PROJECT}/subscriptions/idle-{number}", "topic": topic}
        subscriber.create_subscription(request={**config, "push_config": {"push_endpoint": receiver.url}})
    before = sum(process.cpu_times()[:2])
    time.sleep(3)
    used = sum(process.cpu_times()[:2]) - before
    return f"{used / 3:.2%} of a core, {process.memory_info().rss / 2**20:.0f} MiB resident"


def _topic(publisher: Any, name: str) -> str:
    topic = f"{PROJECT}/topics/{name}"
    publisher.create_topic(name=topic)
    return topic


@contextlib.contextmanager
def _emulator(folder: Path) -> Iterator[psutil.Process]:
    command = [sys.executable, "-P", "-c", SERVER, str(folder / "state.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        os.environ["PUBSUB_EMULATOR_HOST"] = process.stdout.readline().strip()
        try:
            yield psutil.Process(process.pid)
        finally:
            del os.environ["PUBSUB_EMULATOR_HOST"]
            process.kill()


@contextlib.contextmanager
def _receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(receiver.serve(ready, stop)))
    thread.start()
    ready.wait(10)
    yield receiver
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def _report(name: str, samples: list[float]) -> None:
    ordered = sorted(samples)
    p99 = ordered[int(len(ordered) * 0.99)]
    print(f"{name}: p50 {statistics.median(ordered) * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms (n={len(ordered)})")
