"""StreamingPull: flow control, acks on the stream, and the ways a stream ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.api_core import exceptions
from google.cloud import pubsub_v1
from google.cloud.pubsub_v1 import types

from .conftest import PubSub, eventually

Request = types.StreamingPullRequest.pb()
Response = types.StreamingPullResponse.pb()


class Stream:
    """A StreamingPull call without the client library, for requests that the library never sends."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.outgoing: queue.Queue[Any] = queue.Queue()
        call = self.channel.stream_stream(
            "/google.pubsub.v1.Subscriber/StreamingPull", Request.SerializeToString, Response.FromString
        )
        self.call = call(iter(self.outgoing.get, None))
        self.incoming: queue.Queue[Any] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        try:
            for response in self.call:
                self.incoming.put(response)
            self.incoming.put(None)
        except grpc.RpcError as error:
            self.incoming.put(error)

    def send(self, **fields: Any) -> None:
        self.outgoing.put(Request(**fields))

    def messages(self, count: int) -> list[Any]:
        received: list[Any] = []
        while len(received) < count:
            received += self.incoming.get(timeout=60).received_messages
        assert len(received) == count
        return received

    def close(self) -> None:
        self.outgoing.put(None)
        self.call.cancel()
        self.reader.join(60)
        self.channel.close()


@pytest.fixture
def stream(pubsub: PubSub) -> Iterator[Stream]:
    stream = Stream(pubsub.address)
    yield stream
    stream.close()


def test_unlimited_stream_gets_all_and_half_close_ends_it(pubsub: PubSub, stream: Stream) -> None:
    topic = pubsub.topic()
    subscription = pubsub.subscription(topic)
    pubsub.publish(topic, *(b"%d" % number for number in range(10)))
    stream.send(subscription=subscription, stream_ack_deadline_seconds=10)
    received = stream.messages(10)
    stream.send(ack_ids=[item.ack_id for item in received])
    stream.outgoing.put(None)
    assert stream.incoming.get(timeout=60) is None
    eventually(lambda: pubsub.query("SELECT COUNT(*) FROM pubsub_deliveries") == [(0,)])


def test_flow_control_stops_at_the_limit_and_resumes_on_ack(pubsub: PubSub, stream: Stream) -> None:
    topic = pubsub.topic()
    subscription = pubsub.subscription(topic)
    pubsub.publish(topic, *(b"%d" % number for number in range(7)))
    stream.send(subscription=subscription, stream_ack_deadline_seconds=10, max_outstanding_messages=3)
    first = stream.messages(3)
    with pytest.raises(queue.Empty):
        stream.incoming.get(timeout=0.3)
    stream.send(ack_ids=[item.ack_id for item in first[:1]])
    pubsub.ack(subscription, first[1:2])  # acked outside of the stream, as the Python client does
    second = stream.messages(2)
    stream.send(modify_deadline_ack_ids=[second[0].ack_id], modify_deadline_seconds=[0])
    assert len(stream.messages(1)) == 1


def test_flow_control_by_bytes(pubsub: PubSub, stream: Stream) -> None:
    topic = pubsub.topic()
    subscription = pubsub.subscription(topic)
    stream.send(subscription=subscription, stream_ack_deadline_seconds=10, max_outstanding_bytes=1500)
    for number in range(3):
        pubsub.publish(topic, b"%d" % number * 1000)
    received = stream.messages(2)
    with pytest.raises(queue.Empty):
        stream.incoming.get(timeout=0.3)
    stream.send(ack_ids=[item.ack_id for item in received])
    stream.messages(1)


def test_two_streams_share_the_messages(pubsub: PubSub, stream: Stream) -> None:
    topic = pubsub.topic()
    subscription = pubsub.subscription(topic)
    other = Stream(pubsub.address)
    for each in (stream, other):
        each.send(subscription=subscription, stream_ack_deadline_seconds=10, max_outstanding_messages=5)
    sent = pubsub.publish(topic, *(b"%d" % number for number in range(10)))
    received = stream.messages(5) + other.messages(5)
    assert sorted(item.message.message_id for item in received) == sorted(sent)
    other.close()


def test_exactly_once_stream_confirms_settled_messages(pubsub: PubSub, stream: Stream) -> None:
    topic = pubsub.topic()
    subscription = pubsub.subscription(topic, enable_exactly_once_delivery=True)
    pubsub.publish(topic, b"x")
    stream.send(subscription=subscription, stream_ack_deadline_seconds=60)
    (received,) = stream.messages(1)
    stream.send(ack_ids=[received.ack_id])
    assert list(stream.incoming.get(timeout=60).acknowledge_confirmation.ack_ids) == [received.ack_id]
    stream.send(ack_ids=[received.ack_id])
    assert list(stream.incoming.get(timeout=60).acknowledge_confirmation.invalid_ack_ids) == [received.ack_id]


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ({"stream_ack_deadline_seconds": 9}, None, grpc.StatusCode.INVALID_ARGUMENT),
        ({"stream_ack_deadline_seconds": 601}, None, grpc.StatusCode.INVALID_ARGUMENT),
        ({}, {"ack_ids": ["bogus"]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({}, {"modify_deadline_ack_ids": ["1-1-1"]}, grpc.StatusCode.INVALID_ARGUMENT),
        ({}, {"max_outstanding_messages": 5}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"subscription": "projects/p/subscriptions/missing"}, None, grpc.StatusCode.NOT_FOUND),
        ({"subscription": ""}, None, grpc.StatusCode.NOT_FOUND),
    ],
)
def test_invalid_request_aborts_the_stream(
    pubsub: PubSub, stream: Stream, first: dict[str, Any], second: dict[str, Any] | None, code: grpc.StatusCode
) -> None:
    subscription = pubsub.subscription(pubsub.topic())
    stream.send(**{"subscription": subscription, "stream_ack_deadline_seconds": 10, **first})
    if second is not None:
        stream.send(**second)
    error = stream.incoming.get(timeout=60)
    assert error.code() == code


def test_deleting_the_subscription_ends_the_stream(pubsub: PubSub) -> None:
    subscription = pubsub.subscription(pubsub.topic())
    future = pubsub.subscriber.subscribe(subscription, lambda message: message.ack())
    pubsub.subscriber.delete_subscription(subscription=subscription)
    with pytest.raises(exceptions.NotFound):
        future.result(10)


def test_cancelled_streams_release_their_resources(pubsub: PubSub) -> None:
    topic = pubsub.topic()
    subscription = pubsub.subscription(topic)
    for _ in range(3):
        stream = Stream(pubsub.address)
        stream.send(subscription=subscription, stream_ack_deadline_seconds=10)
        pubsub.publish(topic, b"x")
        stream.messages(1)
        stream.close()
    emulator = pubsub.emulator
    assert emulator is not None
    eventually(lambda: not emulator._wakes._events and not emulator._puller._owners)


def test_nacks_and_flow_control_of_the_real_client_under_load(pubsub: PubSub) -> None:
    topic = pubsub.topic()
    subscription = pubsub.subscription(topic)
    settled: set[str] = set()
    nacked: set[str] = set()
    complete = threading.Event()
    lock = threading.Lock()

    def receive(message: Any) -> None:
        with lock:
            if message.message_id not in nacked:
                nacked.add(message.message_id)
                message.nack()
                return
            settled.add(message.message_id)
        message.ack()
        if len(settled) == 200:
            complete.set()

    flow = pubsub_v1.types.FlowControl(max_messages=20)
    future = pubsub.subscriber.subscribe(subscription, receive, flow_control=flow)
    pubsub.publish(topic, *(b"x" for _ in range(200)))
    assert complete.wait(60), len(settled)
    future.cancel()
    future.result(10)
    eventually(lambda: pubsub.query("SELECT COUNT(*) FROM pubsub_deliveries") == [(0,)])
