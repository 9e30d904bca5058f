"""The same client calls against this emulator and Google's, where java and its jar are installed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from google.api_core import exceptions
from google.cloud import pubsub_v1
from google.protobuf.timestamp_pb2 import Timestamp
from tests.patience import PATIENCE_SECONDS

from dropforge_local.base.clock import SystemClock

from .conftest import PROJECT, Endpoint, PubSub, eventually, serve


def official_jar() -> Path:
    if shutil.which("java") is None or (gcloud := shutil.which("gcloud")) is None:
        pytest.skip("java and gcloud with its Pub/Sub emulator are not installed")
    folder = Path(gcloud).resolve().parent.parent / "platform/pubsub-emulator/lib"
    jars = sorted(folder.glob("cloud-pubsub-emulator-*-all.jar"))
    if not jars:
        pytest.skip("gcloud has no pubsub-emulator component")
    return jars[-1]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def official_address() -> Iterator[str]:
    """Google's emulator. Its state is in memory: one process serves all tests of the module."""
    jar = official_jar()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx128m"]
    process = subprocess.Popen(
        ["java", *flags, "-jar", str(jar), "--host=127.0.0.1", f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not listens(port):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(params=["ours", pytest.param("official", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PubSub]:
    if request.param == "ours":
        yield from serve(SystemClock(), tmp_path / "state.db")
    else:
        client = PubSub(request.getfixturevalue("official_address"))
        yield client
        client.close()


def test_topics_are_created_listed_and_deleted(either: PubSub) -> None:
    topic = either.topic(labels={"team": "search"})
    with pytest.raises(exceptions.AlreadyExists):
        either.publisher.create_topic(name=topic, retry=None)
    assert either.publisher.get_topic(topic=topic).labels == {"team": "search"}
    assert topic in [item.name for item in either.publisher.list_topics(project=PROJECT)]
    either.publisher.delete_topic(topic=topic, retry=None)
    with pytest.raises(exceptions.NotFound):
        either.publisher.get_topic(topic=topic, retry=None)


def test_subscription_outlives_its_topic(either: PubSub) -> None:
    topic = either.topic()
    subscription = either.subscription(topic)
    assert list(either.publisher.list_topic_subscriptions(topic=topic)) == [subscription]
    either.publisher.delete_topic(topic=topic, retry=None)
    assert either.subscriber.get_subscription(subscription=subscription).topic == "_deleted-topic_"


def test_missing_resources_are_not_found(either: PubSub) -> None:
    missing = f"{PROJECT}/topics/missing"
    with pytest.raises(exceptions.NotFound):
        either.subscription(missing)
    with pytest.raises(exceptions.NotFound):
        either.publish(missing, b"x")
    with pytest.raises(exceptions.NotFound):
        either.pull(f"{PROJECT}/subscriptions/missing")


def test_message_arrives_with_all_its_fields(either: PubSub) -> None:
    topic = either.topic()
    subscription = either.subscription(topic)
    before = time.time()
    (sent,) = either.publish(topic, b"\x00data\xff", kind="test", text="日本")
    (received,) = either.pull_until(subscription, 1)
    message = received.message
    assert (message.data, dict(message.attributes)) == (b"\x00data\xff", {"kind": "test", "text": "日本"})
    assert message.message_id == sent
    assert before - 5 < message.publish_time.timestamp() < time.time() + 5  # Pub/Sub's clock may differ
    assert received.delivery_attempt == 0


def test_each_subscription_gets_every_message_and_only_once_when_acked(either: PubSub) -> None:
    topic = either.topic()
    first, second = either.subscription(topic), either.subscription(topic)
    sent = either.publish(topic, b"1", b"2", b"3")
    for subscription in (first, second):
        received = either.pull_until(subscription, 3)
        assert sorted(item.message.message_id for item in received) == sorted(sent)
        either.ack(subscription, received)
    assert either.pull(first) == []


def test_message_published_before_the_subscription_is_not_delivered(either: PubSub) -> None:
    topic = either.topic()
    either.publish(topic, b"early")
    subscription = either.subscription(topic)
    assert either.pull(subscription) == []


def test_nacked_message_is_redelivered(either: PubSub) -> None:
    topic = either.topic()
    subscription = either.subscription(topic)
    either.publish(topic, b"again")
    first = either.pull_until(subscription, 1)
    either.nack(subscription, first)
    (again,) = either.pull_until(subscription, 1)
    assert again.message.message_id == first[0].message.message_id
    assert again.ack_id != first[0].ack_id


def test_leased_message_is_not_delivered_twice(either: PubSub) -> None:
    topic = either.topic()
    subscription = either.subscription(topic)
    either.publish(topic, b"once")
    either.pull_until(subscription, 1)
    assert either.pull(subscription) == []


def test_racing_pulls_share_the_messages(either: PubSub) -> None:
    topic = either.topic()
    subscription = either.subscription(topic)
    sent = either.publish(topic, *(b"%d" % number for number in range(40)))

    def take(_: int) -> list[str]:
        return [item.message.message_id for _ in range(4) for item in either.pull(subscription, 3)]

    with ThreadPoolExecutor(8) as pool:
        taken = [message for part in pool.map(take, range(8)) for message in part]
    assert len(taken) == len(set(taken))
    rest = either.pull_until(subscription, len(sent) - len(taken))
    assert sorted(taken + [item.message.message_id for item in rest]) == sorted(sent)


def test_dead_letter_topic_receives_a_message_after_five_nacks(either: PubSub) -> None:
    topic, graveyard = either.topic(), either.topic()
    dead = either.subscription(graveyard)
    policy = {"dead_letter_topic": graveyard, "max_delivery_attempts": 5}
    subscription = either.subscription(topic, dead_letter_policy=policy)
    (sent,) = either.publish(topic, b"poison", kind="bad")
    for attempt in range(1, 6):
        received = either.pull_until(subscription, 1)
        assert received[0].delivery_attempt == attempt
        either.nack(subscription, received)
    assert either.pull(subscription) == []  # Google's emulator forwards the message at its next due time
    (letter,) = either.pull_until(dead, 1)
    attributes = dict(letter.message.attributes)
    assert letter.message.data == b"poison"
    assert letter.message.message_id != sent
    assert attributes.pop("CloudPubSubDeadLetterSourceTopicPublishTime").startswith("20")
    assert attributes == {
        "kind": "bad",
        "CloudPubSubDeadLetterSourceDeliveryCount": "5",
        "CloudPubSubDeadLetterSourceSubscription": subscription.rpartition("/")[2],
        "CloudPubSubDeadLetterSourceSubscriptionProject": "test-project",
    }


def test_ordering_key_keeps_publish_order(either: PubSub) -> None:
    topic = either.topic()
    subscription = either.subscription(topic, enable_message_ordering=True)
    either.publish(topic, *(b"%d" % number for number in range(20)), ordering_key="k")
    received = either.pull_until(subscription, 20)
    assert [int(item.message.data) for item in received] == list(range(20))
    either.nack(subscription, received)
    again = either.pull_until(subscription, 20)
    assert [int(item.message.data) for item in again] == list(range(20))


def test_seek_to_now_purges(either: PubSub) -> None:
    topic = either.topic()
    subscription = either.subscription(topic)
    either.publish(topic, b"old")
    future = Timestamp(seconds=int(time.time()) + 60)
    either.subscriber.seek(request={"subscription": subscription, "time": future}, retry=None)
    assert either.pull(subscription) == []


def test_seek_back_restores_retained_messages(either: PubSub) -> None:
    topic = either.topic()
    subscription = either.subscription(topic, retain_acked_messages=True)
    sent = either.publish(topic, b"1", b"2")
    either.ack(subscription, either.pull_until(subscription, 2))
    past = Timestamp(seconds=int(time.time()) - 60)
    either.subscriber.seek(request={"subscription": subscription, "time": past}, retry=None)
    assert sorted(item.message.message_id for item in either.pull_until(subscription, 2)) == sorted(sent)


def test_snapshot_restores_unacked_messages(either: PubSub) -> None:
    topic = either.topic()
    subscription = either.subscription(topic)
    sent = either.publish(topic, b"1", b"2")
    snapshot = f"{PROJECT}/snapshots/snap-{either.run}"
    created = either.subscriber.create_snapshot(request={"name": snapshot, "subscription": subscription}, retry=None)
    assert created.topic == topic
    either.ack(subscription, either.pull_until(subscription, 2))
    sent += either.publish(topic, b"3")
    either.ack(subscription, either.pull_until(subscription, 1))
    either.subscriber.seek(request={"subscription": subscription, "snapshot": snapshot}, retry=None)
    assert sorted(item.message.message_id for item in either.pull_until(subscription, 3)) == sorted(sent)
    either.subscriber.delete_snapshot(snapshot=snapshot, retry=None)
    assert snapshot not in [item.name for item in either.subscriber.list_snapshots(project=PROJECT)]


def test_update_changes_the_fields_in_the_mask(either: PubSub) -> None:
    subscription = either.subscription(either.topic())
    either.subscriber.update_subscription(
        request={
            "subscription": {"name": subscription, "ack_deadline_seconds": 77, "labels": {"a": "b"}},
            "update_mask": {"paths": ["ack_deadline_seconds"]},
        },
        retry=None,
    )
    updated = either.subscriber.get_subscription(subscription=subscription)
    assert (updated.ack_deadline_seconds, dict(updated.labels)) == (77, {})


def test_streaming_pull_delivers_everything_under_load(either: PubSub) -> None:
    topic = either.topic()
    subscription = either.subscription(topic)
    received: list[str] = []
    complete = threading.Event()

    def receive(message: pubsub_v1.subscriber.message.Message) -> None:
        received.append(message.message_id)
        message.ack()
        if len(set(received)) == 500:
            complete.set()

    with ThreadPoolExecutor(4) as pool:
        stream = either.subscriber.subscribe(subscription, receive)
        list(pool.map(lambda part: either.publish(topic, *(b"%d" % n for n in range(part, part + 125))), range(4)))
    assert complete.wait(60), len(set(received))
    stream.cancel()
    stream.result(10)
    assert len(received) == 500


@pytest.mark.parametrize(
    "config",
    [{"ack_deadline_seconds": -1}, {"ack_deadline_seconds": 601}, {"message_retention_duration": {"seconds": 10}}],
)
def test_invalid_subscription_is_refused(either: PubSub, config: dict[str, object]) -> None:
    with pytest.raises(exceptions.InvalidArgument):
        either.subscription(either.topic(), **config)


def test_empty_message_is_refused(either: PubSub) -> None:
    with pytest.raises(exceptions.InvalidArgument):
        either.publish(either.topic(), b"")


def test_push_bodies_have_the_same_form(either: PubSub, endpoint: Endpoint) -> None:
    topic = either.topic()
    subscription = either.subscription(topic, push_config={"push_endpoint": endpoint.url})
    either.publish(topic, b"data", kind="test")
    either.publish(topic, b"bare")
    either.publish(topic, b"", only="attributes")
    eventually(lambda: len(endpoint.requests) == 3)
    bodies = {request.json["message"]["data"]: request.json for request in endpoint.requests}
    fields = {"data", "attributes", "messageId", "message_id", "publishTime", "publish_time"}
    assert all(set(body["message"]) == fields for body in bodies.values())
    assert all(set(body) == {"message", "subscription"} for body in bodies.values())
    assert (bodies["YmFyZQ=="]["message"]["attributes"], subscription) == ({}, bodies[""]["subscription"])
