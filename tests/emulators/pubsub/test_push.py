"""Push delivery to a real HTTP endpoint: bodies, headers, acks, backoff, bounds, dead letters."""

from __future__ import annotations

import base64
import threading

import pytest
from google.api_core import exceptions
from tests.patience import PATIENCE_SECONDS

from dropforge_local.emulators.pubsub import DeliveryFaults

from .conftest import Endpoint, PubSub, Request, eventually


def test_wrapped_body_and_oidc_token(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic = pubsub.topic()
    push = {"push_endpoint": endpoint.url, "oidc_token": {"service_account_email": "a@b.c", "audience": "me"}}
    subscription = pubsub.subscription(topic, push_config=push)
    (sent,) = pubsub.publish(topic, b"hello", kind="test")
    (request,) = eventually(lambda: endpoint.requests)
    message = request.json["message"]
    assert request.json["subscription"] == subscription
    assert "deliveryAttempt" not in request.json
    assert base64.b64decode(message["data"]) == b"hello"
    assert message["attributes"] == {"kind": "test"}
    assert message["messageId"] == message["message_id"] == sent
    assert message["publishTime"] == message["publish_time"]
    assert request.headers["content-type"] == "application/json"
    assert request.headers["authorization"] == "Bearer token-of-a@b.c-for-me"


def test_token_is_optional_and_its_audience_is_the_endpoint_by_default(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic = pubsub.topic()
    pubsub.subscription(topic, push_config={"push_endpoint": endpoint.url})
    with_token = {"push_endpoint": endpoint.url, "oidc_token": {"service_account_email": "a@b.c"}}
    pubsub.subscription(topic, push_config=with_token)
    pubsub.publish(topic, b"x")
    eventually(lambda: len(endpoint.requests) == 2)
    tokens = {request.headers.get("authorization") for request in endpoint.requests}
    assert tokens == {None, f"Bearer token-of-a@b.c-for-{endpoint.url}"}


def test_unwrapped_message_becomes_body_and_headers(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic = pubsub.topic()
    push = {"push_endpoint": endpoint.url, "no_wrapper": {"write_metadata": True}}
    subscription = pubsub.subscription(topic, push_config=push)
    attributes = {"ce-type": "t", "Content-Type": "application/json", "bad name": "x", "line": "a\r\nb: c"}
    (sent,) = pubsub.publish(topic, b'{"a": 1}', **attributes)
    (request,) = eventually(lambda: endpoint.requests)
    assert request.body == b'{"a": 1}'
    assert (request.headers["ce-type"], request.headers["content-type"]) == ("t", "application/json")
    assert request.headers["x-goog-pubsub-message-id"] == sent
    assert request.headers["x-goog-pubsub-subscription-name"] == subscription
    assert request.headers["line"] == "a  b: c"
    assert "bad name" not in request.headers
    assert "b" not in request.headers


@pytest.mark.parametrize("status", [200, 201, 202, 204])
def test_success_acks(pubsub: PubSub, endpoint: Endpoint, status: int) -> None:
    topic = pubsub.topic()
    pubsub.subscription(topic, push_config={"push_endpoint": endpoint.url})
    endpoint.answer = lambda request: status
    pubsub.publish(topic, b"x")
    eventually(lambda: pubsub.query("SELECT COUNT(*) FROM pubsub_deliveries") == [(0,)])
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("status", [203, 206, 301, 400, 404, 429, 500, 503])
def test_any_other_status_is_retried(pubsub: PubSub, endpoint: Endpoint, status: int) -> None:
    topic = pubsub.topic()
    pubsub.subscription(topic, push_config={"push_endpoint": endpoint.url})
    endpoint.answer = lambda request: status if len(endpoint.requests) < 3 else 200
    pubsub.publish(topic, b"x")
    eventually(lambda: pubsub.query("SELECT COUNT(*) FROM pubsub_deliveries") == [(0,)])
    first, second, third = (request.arrived for request in endpoint.requests)
    assert second - first >= 0.1
    assert third - second >= 0.2


def test_push_backoff_follows_the_retry_policy(timeless: PubSub, endpoint: Endpoint) -> None:
    topic = timeless.topic()
    policy = {"minimum_backoff": {"seconds": 10}, "maximum_backoff": {"seconds": 15}}
    timeless.subscription(topic, push_config={"push_endpoint": endpoint.url}, retry_policy=policy)
    endpoint.answer = lambda request: 500
    timeless.publish(topic, b"x")
    for count, delay in enumerate((10, 15, 15), start=1):
        eventually(lambda failures: timeless.query("SELECT failures FROM pubsub_deliveries") == [(failures,)], count)
        timeless.advance(delay - 0.5)
        timeless.query("SELECT 1")
        assert len(endpoint.requests) == count
        timeless.advance(0.6)


def test_endpoint_that_is_down_gets_its_messages_when_it_is_up(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic = pubsub.topic()
    subscription = pubsub.subscription(topic, push_config={"push_endpoint": "http://127.0.0.1:9/nobody"})
    sent = pubsub.publish(topic, b"1", b"2")
    eventually(lambda: pubsub.query("SELECT MIN(failures) FROM pubsub_deliveries")[0][0] >= 1)
    config = {"push_endpoint": endpoint.url}
    pubsub.subscriber.modify_push_config(request={"subscription": subscription, "push_config": config})
    eventually(lambda: len(endpoint.requests) == 2)
    assert sorted(request.json["message"]["messageId"] for request in endpoint.requests) == sorted(sent)


def test_switching_between_push_and_pull(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic = pubsub.topic()
    subscription = pubsub.subscription(topic, push_config={"push_endpoint": endpoint.url})
    with pytest.raises(exceptions.FailedPrecondition):
        pubsub.pull(subscription)
    pubsub.subscriber.modify_push_config(request={"subscription": subscription, "push_config": {}})
    pubsub.publish(topic, b"pulled")
    assert pubsub.pull_until(subscription, 1)[0].message.data == b"pulled"
    assert endpoint.requests == []


def test_dead_letter_after_five_pushes_with_attempts_counted(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic, graveyard = pubsub.topic(), pubsub.topic()
    dead = pubsub.subscription(graveyard)
    pubsub.subscription(
        topic,
        push_config={"push_endpoint": endpoint.url},
        retry_policy={"minimum_backoff": {}, "maximum_backoff": {}},
        dead_letter_policy={"dead_letter_topic": graveyard, "max_delivery_attempts": 5},
    )
    endpoint.answer = lambda request: 500
    pubsub.publish(topic, b"poison")
    (letter,) = pubsub.pull_until(dead, 1)
    assert letter.message.attributes["CloudPubSubDeadLetterSourceDeliveryCount"] == "5"
    assert [request.json["deliveryAttempt"] for request in endpoint.requests] == [1, 2, 3, 4, 5]


def test_pushes_in_flight_are_bounded_and_a_slow_push_delays_no_other(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic = pubsub.topic()
    pubsub.subscription(topic, push_config={"push_endpoint": endpoint.url})
    gate = threading.Event()
    endpoint.answer = lambda request: (gate.wait(60) and 200) or 500
    pubsub.publish(topic, *(b"%d" % number for number in range(50)))
    eventually(lambda: endpoint.in_flight == 32)
    gate.set()
    eventually(lambda: len(endpoint.requests) >= 50)
    assert endpoint.most_in_flight == 32
    assert sorted(map(int, endpoint.bodies())) == list(range(50))


def test_connections_are_kept_alive(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic = pubsub.topic()
    pubsub.subscription(topic, push_config={"push_endpoint": endpoint.url})
    for number in range(10):
        pubsub.publish(topic, b"x")
        eventually(lambda sent: len(endpoint.requests) == sent and endpoint.in_flight == 0, number + 1)
    assert len(endpoint.connections) <= 2


def test_ordered_push_sends_one_message_of_a_key_at_a_time(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic = pubsub.topic()
    pubsub.subscription(topic, push_config={"push_endpoint": endpoint.url}, enable_message_ordering=True)
    failed = threading.Event()

    def answer(request: Request) -> int:
        if request.json["message"]["data"] == base64.b64encode(b"3").decode() and not failed.is_set():
            failed.set()
            return 500
        return 200

    endpoint.answer = answer
    pubsub.publish(topic, *(b"%d" % number for number in range(6)), ordering_key="k")
    eventually(lambda: len(endpoint.requests) == 7)
    assert [int(body) for body in endpoint.bodies()] == [0, 1, 2, 3, 3, 4, 5]
    assert endpoint.most_in_flight == 1
    assert endpoint.requests[0].json["message"]["orderingKey"] == "k"


def test_duplicate_fault_pushes_twice(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic = pubsub.topic()
    pubsub.subscription(topic, push_config={"push_endpoint": endpoint.url})
    assert pubsub.emulator is not None
    pubsub.emulator.faults = DeliveryFaults(duplicate=1.0)
    pubsub.publish(topic, b"x")
    eventually(lambda: pubsub.query("SELECT COUNT(*) FROM pubsub_deliveries") == [(0,)])
    first, second = endpoint.requests
    assert first.json["message"]["messageId"] == second.json["message"]["messageId"]


def test_deleted_subscription_is_not_pushed(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic = pubsub.topic()
    subscription = pubsub.subscription(topic, push_config={"push_endpoint": endpoint.url})
    endpoint.answer = lambda request: 500
    pubsub.publish(topic, b"x")
    eventually(lambda: endpoint.requests)
    pubsub.subscriber.delete_subscription(subscription=subscription)
    emulator = pubsub.emulator
    assert emulator is not None
    eventually(lambda: not emulator._pusher._pumps)


@pytest.mark.parametrize("url", ["ftp://host/x", "not a url", "http://", "http://[bad"])
def test_invalid_endpoint_is_refused(pubsub: PubSub, url: str) -> None:
    with pytest.raises(exceptions.InvalidArgument):
        pubsub.subscription(pubsub.topic(), push_config={"push_endpoint": url})


@pytest.mark.slow
def test_push_times_out_at_the_ack_deadline(pubsub: PubSub, endpoint: Endpoint) -> None:
    topic = pubsub.topic()
    pubsub.subscription(topic, push_config={"push_endpoint": endpoint.url})
    release = threading.Event()
    endpoint.answer = lambda request: (
        200 if len(endpoint.requests) > 1 else ((release.wait(PATIENCE_SECONDS) and 200) or 500)
    )
    pubsub.publish(topic, b"x")
    eventually(lambda: len(endpoint.requests) == 2)  # while the first request still waits for its answer
    release.set()
    first, second = endpoint.requests
    assert second.arrived - first.arrived >= 10
