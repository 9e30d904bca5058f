"""Retries, dead letters, ordering, leases, exactly-once, seek and retention, on a clock that only the tests move."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
import requests
from google.api_core import exceptions
from google.protobuf.timestamp_pb2 import Timestamp
from google.pubsub_v1 import PublisherClient as GapicPublisher  # publishes without batching
from google.pubsub_v1 import SchemaServiceClient
from google.pubsub_v1.services.schema_service.transports import SchemaServiceGrpcTransport

from dropforge_local.emulators.pubsub import DeliveryFaults

from .conftest import PROJECT, PubSub


def data(received: list[Any]) -> list[bytes]:
    return [item.message.data for item in received]


def retry(minimum: int, maximum: int) -> dict[str, Any]:
    return {"minimum_backoff": {"seconds": minimum}, "maximum_backoff": {"seconds": maximum}}


def test_nack_backs_off_exponentially_up_to_the_maximum(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic, retry_policy=retry(10, 35))
    timeless.publish(topic, b"x")
    received = timeless.pull(subscription)
    for delay in (10, 20, 35, 35):
        timeless.nack(subscription, received)
        timeless.advance(delay - 0.1)
        assert timeless.pull(subscription) == []
        timeless.advance(0.2)
        received = timeless.pull(subscription)
        assert data(received) == [b"x"]


def test_retry_policy_defaults_to_10_and_600_seconds(timeless: PubSub) -> None:
    subscription = timeless.subscription(timeless.topic(), retry_policy={})
    policy = timeless.subscriber.get_subscription(subscription=subscription).retry_policy
    assert (policy.minimum_backoff.seconds, policy.maximum_backoff.seconds) == (10, 600)


def test_expired_lease_counts_as_a_failure(timeless: PubSub) -> None:
    topic = timeless.topic()
    policy = {"dead_letter_topic": timeless.topic()}
    subscription = timeless.subscription(topic, retry_policy=retry(30, 60), dead_letter_policy=policy)
    timeless.publish(topic, b"x")
    assert timeless.pull(subscription)[0].delivery_attempt == 1
    timeless.advance(10)  # the lease expires
    assert timeless.pull(subscription) == []
    timeless.advance(30)  # the backoff ends
    assert timeless.pull(subscription)[0].delivery_attempt == 2


def test_extended_lease_holds(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic)
    timeless.publish(topic, b"x")
    (received,) = timeless.pull(subscription)
    request = {"subscription": subscription, "ack_ids": [received.ack_id], "ack_deadline_seconds": 60}
    timeless.subscriber.modify_ack_deadline(request=request)
    timeless.advance(59)
    assert timeless.pull(subscription) == []
    timeless.advance(2)
    assert data(timeless.pull(subscription)) == [b"x"]


def test_late_ack_still_counts_without_exactly_once(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic)
    timeless.publish(topic, b"x")
    received = timeless.pull(subscription)
    timeless.advance(20)
    timeless.ack(subscription, received)
    timeless.advance(20)
    assert timeless.pull(subscription) == []


def test_exactly_once_refuses_an_expired_ack_id_and_names_it(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic, enable_exactly_once_delivery=True)
    timeless.publish(topic, b"x")
    received = timeless.pull(subscription)
    timeless.advance(11)
    with pytest.raises(exceptions.FailedPrecondition) as refused:
        timeless.ack(subscription, received)
    assert received[0].ack_id in str(refused.value.details)
    timeless.advance(1)
    timeless.ack(subscription, timeless.pull(subscription))
    assert timeless.pull(subscription) == []


@pytest.mark.parametrize("ack_id", ["", "bogus", "1-2", "1-2-3-4", "zz-1-1", "1-1-ffffffffffffffffffff"])
def test_malformed_ack_id_is_refused(timeless: PubSub, ack_id: str) -> None:
    subscription = timeless.subscription(timeless.topic())
    with pytest.raises(exceptions.InvalidArgument):
        timeless.subscriber.acknowledge(request={"subscription": subscription, "ack_ids": [ack_id]}, retry=None)


def test_ack_id_of_another_subscription_is_refused(timeless: PubSub) -> None:
    topic = timeless.topic()
    first, second = timeless.subscription(topic), timeless.subscription(topic)
    timeless.publish(topic, b"x")
    with pytest.raises(exceptions.InvalidArgument):
        timeless.ack(second, timeless.pull(first))


def test_dead_letter_by_expired_leases_alone(timeless: PubSub) -> None:
    topic, graveyard = timeless.topic(), timeless.topic()
    dead = timeless.subscription(graveyard)
    subscription = timeless.subscription(topic, dead_letter_policy={"dead_letter_topic": graveyard})
    timeless.publish(topic, b"x")
    for _ in range(5):
        assert len(timeless.pull(subscription)) == 1
        timeless.advance(12)
    assert data(timeless.pull(dead)) == [b"x"]
    assert timeless.query("SELECT COUNT(*) FROM pubsub_messages") == [(1,)]


def test_message_stays_when_its_dead_letter_topic_was_deleted(timeless: PubSub) -> None:
    topic, graveyard = timeless.topic(), timeless.topic()
    subscription = timeless.subscription(topic, dead_letter_policy={"dead_letter_topic": graveyard})
    timeless.publisher.delete_topic(topic=graveyard)
    timeless.publish(topic, b"x")
    for attempt in range(1, 8):
        received = timeless.pull(subscription)
        assert received[0].delivery_attempt == attempt
        timeless.nack(subscription, received)
        timeless.advance(2)


@pytest.mark.parametrize("attempts", [4, 101, -1])
def test_dead_letter_attempts_are_5_to_100(timeless: PubSub, attempts: int) -> None:
    topic = timeless.topic()
    policy = {"dead_letter_topic": topic, "max_delivery_attempts": attempts}
    with pytest.raises(exceptions.InvalidArgument):
        timeless.subscription(topic, dead_letter_policy=policy)


def test_filter_delivers_only_matching_messages(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic, filter='attributes.kind = "job" AND NOT attributes:test')
    timeless.publish(topic, b"1", kind="job")
    timeless.publish(topic, b"2", kind="job", test="")
    timeless.publish(topic, b"3")
    assert data(timeless.pull(subscription)) == [b"1"]
    assert timeless.query("SELECT COUNT(*) FROM pubsub_messages") == [(1,)]


def test_invalid_filter_is_refused(timeless: PubSub) -> None:
    with pytest.raises(exceptions.InvalidArgument, match="invalid filter"):
        timeless.subscription(timeless.topic(), filter='attributes.kind > "job"')


def test_ordering_key_waits_for_its_head_while_other_keys_continue(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic, enable_message_ordering=True, retry_policy=retry(60, 60))
    timeless.publish(topic, b"a1", b"a2", ordering_key="a")
    timeless.publish(topic, b"b1", ordering_key="b")
    received = timeless.pull(subscription)
    assert data(received) == [b"a1", b"a2", b"b1"]
    timeless.nack(subscription, received[:1])
    timeless.publish(topic, b"a3", ordering_key="a")
    timeless.publish(topic, b"free")
    assert data(timeless.pull(subscription)) == [b"free"]
    timeless.advance(61)
    assert [item for item in data(timeless.pull(subscription)) if item[:1] == b"a"] == [b"a1", b"a2", b"a3"]


def test_only_one_batch_of_a_key_is_outstanding(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic, enable_message_ordering=True)
    timeless.publish(topic, b"1", b"2", b"3", ordering_key="k")
    first = timeless.pull(subscription, 1)
    assert (data(first), timeless.pull(subscription)) == ([b"1"], [])
    timeless.ack(subscription, first)
    assert data(timeless.pull(subscription)) == [b"2", b"3"]


def test_unacked_message_is_dropped_after_its_retention(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic, message_retention_duration={"seconds": 600})
    timeless.publish(topic, b"x")
    timeless.advance(601)
    assert timeless.pull(subscription) == []
    assert timeless.query("SELECT COUNT(*) FROM pubsub_messages") == [(0,)]


def test_topic_retention_feeds_a_later_subscription_by_seek(timeless: PubSub) -> None:
    topic = timeless.topic(message_retention_duration={"seconds": 3600})
    timeless.publish(topic, b"early")
    subscription = timeless.subscription(topic)
    described = timeless.subscriber.get_subscription(subscription=subscription)
    assert described.topic_message_retention_duration.seconds == 3600
    timeless.subscriber.seek(request={"subscription": subscription, "time": Timestamp(seconds=1)})
    assert data(timeless.pull(subscription)) == [b"early"]
    timeless.advance(3601)
    assert data(timeless.pull(timeless.subscription(topic))) == []


def test_topic_without_a_subscription_stores_no_message(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic)
    timeless.publish(topic, b"x")
    timeless.ack(subscription, timeless.pull(subscription))
    timeless.publish(timeless.topic(), b"unheard")
    assert timeless.query("SELECT COUNT(*) FROM pubsub_messages") == [(0,)]
    assert timeless.query("SELECT COUNT(*) FROM pubsub_deliveries") == [(0,)]


def test_deleted_subscription_takes_its_backlog_with_it(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic)
    timeless.publish(topic, b"x")
    timeless.subscriber.delete_subscription(subscription=subscription)
    assert timeless.query("SELECT COUNT(*) FROM pubsub_messages") == [(0,)]
    with pytest.raises(exceptions.NotFound):
        timeless.pull(subscription)


def test_detached_subscription_cannot_be_pulled(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic)
    timeless.publish(topic, b"x")
    timeless.publisher.detach_subscription(request={"subscription": subscription})
    assert timeless.subscriber.get_subscription(subscription=subscription).detached
    with pytest.raises(exceptions.FailedPrecondition):
        timeless.pull(subscription)
    timeless.publish(topic, b"y")
    assert timeless.query("SELECT COUNT(*) FROM pubsub_deliveries") == [(0,)]


def test_snapshot_expires_and_frees_its_messages(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic)
    timeless.publish(topic, b"x")
    name = f"{PROJECT}/snapshots/snap"
    timeless.subscriber.create_snapshot(request={"name": name, "subscription": subscription})
    timeless.ack(subscription, timeless.pull(subscription))
    assert timeless.query("SELECT COUNT(*) FROM pubsub_messages") == [(1,)]
    timeless.advance(7 * 86400 + 1)
    timeless.pull(subscription)
    assert timeless.query("SELECT COUNT(*) FROM pubsub_messages") == [(0,)]
    with pytest.raises(exceptions.NotFound):
        timeless.subscriber.get_snapshot(snapshot=name, retry=None)


@pytest.mark.parametrize("path", ["topic", "filter", "name", "enable_message_ordering", "no_such_field"])
def test_fixed_fields_cannot_be_updated(timeless: PubSub, path: str) -> None:
    subscription = timeless.subscription(timeless.topic())
    with pytest.raises(exceptions.InvalidArgument):
        timeless.subscriber.update_subscription(
            request={"subscription": {"name": subscription}, "update_mask": {"paths": [path]}}, retry=None
        )


@pytest.mark.parametrize(
    "attributes", [{"goog-reserved": "x"}, {"k" * 257: "x"}, {"k": "v" * 1025}, {f"k{n}": "" for n in range(101)}]
)
def test_attribute_limits(timeless: PubSub, attributes: dict[str, str]) -> None:
    with pytest.raises(exceptions.InvalidArgument):
        timeless.publish(timeless.topic(), b"x", **attributes)


def test_message_larger_than_10_mb_is_refused(timeless: PubSub) -> None:
    request = {"topic": timeless.topic(), "messages": [{"data": b"x" * 10_000_001}]}
    with pytest.raises(exceptions.InvalidArgument, match="10000000"):
        GapicPublisher.publish(timeless.publisher, request=request, retry=None)


@pytest.mark.parametrize("name", ["ab", "1abc", "google-topic", "with space", "x" * 256, "a/b"])
def test_topic_names_are_checked(timeless: PubSub, name: str) -> None:
    with pytest.raises(exceptions.InvalidArgument):
        timeless.publisher.create_topic(name=f"{PROJECT}/topics/{name}", retry=None)


@pytest.mark.parametrize(
    "config",
    [
        {"bigquery_config": {"table": "p.d.t"}},
        {"message_transforms": [{"javascript_udf": {"code": "x", "function_name": "f"}}]},
    ],
)
def test_unsupported_features_answer_unimplemented(timeless: PubSub, config: dict[str, Any]) -> None:
    with pytest.raises(exceptions.MethodNotImplemented, match="not emulated"):
        timeless.subscription(timeless.topic(), **config)


def test_schemas_are_refused_with_the_reason(timeless: PubSub) -> None:
    transport = SchemaServiceGrpcTransport(channel=grpc.insecure_channel(timeless.address))
    with SchemaServiceClient(transport=transport) as client:
        schema: Any = {"type_": "AVRO", "definition": '{"type": "string"}'}
        with pytest.raises(exceptions.MethodNotImplemented, match=r"schemas are not emulated .* Avro or Protocol Buf"):
            client.create_schema(parent=PROJECT, schema=schema, schema_id="s", retry=None)
        with pytest.raises(exceptions.MethodNotImplemented, match="schemas are not emulated"):
            client.validate_message(request={"parent": PROJECT, "schema": schema, "message": b'"x"'}, retry=None)
    settings = {"schema": f"{PROJECT}/schemas/s", "encoding": "JSON"}
    topic = {"name": f"{PROJECT}/topics/with-a-schema", "schema_settings": settings}
    with pytest.raises(exceptions.MethodNotImplemented, match="schema_settings: schemas are not emulated"):
        timeless.publisher.create_topic(request=topic, retry=None)
    assert timeless.server is not None
    answer = requests.get(f"{timeless.server.url}/v1/{PROJECT}/schemas", timeout=60)
    assert (answer.status_code, "schemas are not emulated" in answer.text) == (501, True)


def test_pages_follow_each_other(timeless: PubSub) -> None:
    topics = sorted(timeless.topic() for _ in range(5))
    pager = timeless.publisher.list_topics(request={"project": PROJECT, "page_size": 2})
    assert [[topic.name for topic in page.topics] for page in pager.pages] == [topics[:2], topics[2:4], topics[4:]]


def test_duplicate_fault_delivers_an_acked_message_once_more(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic)
    assert timeless.emulator is not None
    timeless.emulator.faults = DeliveryFaults(seed=1, duplicate=1.0)
    timeless.publish(topic, b"x")
    for expected in ([b"x"], [b"x"], []):
        received = timeless.pull(subscription)
        assert data(received) == expected
        if received:
            timeless.ack(subscription, received)


def test_drop_first_fault_loses_a_delivery_not_the_message(timeless: PubSub) -> None:
    topic = timeless.topic()
    subscription = timeless.subscription(topic, retry_policy=retry(20, 60))
    assert timeless.emulator is not None
    timeless.emulator.faults = DeliveryFaults(drop_first=1.0)
    timeless.publish(topic, b"x")
    assert timeless.pull(subscription) == []
    timeless.advance(21)
    assert data(timeless.pull(subscription)) == [b"x"]


def test_reorder_fault_is_reproducible_and_loses_nothing(timeless: PubSub) -> None:
    topic = timeless.topic()
    first, second = timeless.subscription(topic), timeless.subscription(topic)
    assert timeless.emulator is not None
    timeless.emulator.faults = DeliveryFaults(seed=7, reorder=0.5, delay_seconds=3)
    sent = [b"%d" % number for number in range(20)]
    timeless.publish(topic, *sent)
    assert timeless.pull(first) == []
    timeless.advance(4)
    order = data(timeless.pull(first))
    assert order != sent
    assert sorted(order) == sorted(sent)
    assert sorted(data(timeless.pull(second))) == sorted(sent)
