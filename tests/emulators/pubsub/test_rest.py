"""REST with gcloud and plain HTTP; a malformed request is never a server error."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.pubsub_v1 import PublisherClient, PubsubMessage, SubscriberClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ...gcloud import RunGcloud
from .conftest import PROJECT, PubSub


@pytest.fixture
def call(pubsub: PubSub) -> Callable[..., requests.Response]:
    def send(verb: str, path: str, body: Any = None, **kwargs: Any) -> requests.Response:
        assert pubsub.server is not None
        return requests.request(verb, f"{pubsub.server.url}/v1/{path}", json=body, timeout=60, **kwargs)

    return send


def test_rest_and_grpc_share_one_state(pubsub: PubSub, call: Callable[..., requests.Response]) -> None:
    topic, subscription = f"{PROJECT}/topics/shared", f"{PROJECT}/subscriptions/shared"
    assert call("PUT", topic, {"labels": {"a": "b"}}).json() == {"name": topic, "labels": {"a": "b"}, "state": "ACTIVE"}
    assert call("PUT", subscription, {"topic": topic}).json()["ackDeadlineSeconds"] == 10
    data = base64.b64encode(b"over REST").decode()
    published = call("POST", f"{topic}:publish", {"messages": [{"data": data, "attributes": {"k": "v"}}]}).json()
    (received,) = pubsub.pull(subscription)
    assert [received.message.message_id] == published["messageIds"]
    assert call("POST", f"{subscription}:acknowledge", {"ackIds": [received.ack_id]}).json() == {}
    assert call("POST", f"{subscription}:pull", {"maxMessages": 1, "returnImmediately": True}).json() == {}


def test_google_rest_transport(pubsub: PubSub) -> None:
    assert pubsub.server is not None
    options = ClientOptions(api_endpoint=pubsub.server.url)
    publisher = PublisherClient(transport="rest", credentials=AnonymousCredentials(), client_options=options)
    subscriber = SubscriberClient(transport="rest", credentials=AnonymousCredentials(), client_options=options)
    topic = publisher.create_topic(name=f"{PROJECT}/topics/rest-%41+~").name
    name = f"{PROJECT}/subscriptions/rest"
    subscriber.create_subscription(name=name, topic=topic)
    publisher.publish(topic=topic, messages=[PubsubMessage(data=b"x")], retry=None)
    (received,) = subscriber.pull(subscription=name, max_messages=5, retry=None).received_messages
    subscriber.modify_ack_deadline(subscription=name, ack_ids=[received.ack_id], ack_deadline_seconds=30)
    subscriber.acknowledge(subscription=name, ack_ids=[received.ack_id])
    subscriber.update_subscription(
        request={"subscription": {"name": name, "labels": {"a": "b"}}, "update_mask": {"paths": ["labels"]}}
    )
    assert subscriber.get_subscription(subscription=name).labels == {"a": "b"}
    assert [item.name for item in publisher.list_topics(project=PROJECT)] == [topic]
    publisher.delete_topic(topic=topic)


@pytest.mark.parametrize(
    ("verb", "path", "body", "status", "code"),
    [
        ("PUT", "topics/abc", {"unknownField": 1}, 400, "INVALID_ARGUMENT"),
        ("PUT", "topics/ab", {}, 400, "INVALID_ARGUMENT"),
        ("PUT", "subscriptions/abc", {"topic": 5}, 400, "INVALID_ARGUMENT"),
        ("PUT", "subscriptions/abc", {"topic": f"{PROJECT}/topics/none"}, 404, "NOT_FOUND"),
        ("PUT", "subscriptions/abc", {}, 400, "INVALID_ARGUMENT"),
        ("GET", "topics/none", None, 404, "NOT_FOUND"),
        ("GET", "topics?pageSize=x", None, 400, "INVALID_ARGUMENT"),
        ("GET", "topics?pageToken=x", None, 400, "INVALID_ARGUMENT"),
        ("GET", "topics?nope=1", None, 400, "INVALID_ARGUMENT"),
        ("POST", "topics/none:publish", {"messages": [{"data": "eA=="}]}, 404, "NOT_FOUND"),
        ("POST", "topics/none:publish", {"messages": []}, 400, "INVALID_ARGUMENT"),
        ("POST", "topics/none:publish", {"messages": [{"data": "***"}]}, 400, "INVALID_ARGUMENT"),
        ("POST", "topics/abc:getIamPolicy", {}, 501, "UNIMPLEMENTED"),
        ("GET", "schemas", None, 501, "UNIMPLEMENTED"),
    ],
)
def test_errors_have_googles_form(
    call: Callable[..., requests.Response], verb: str, path: str, body: Any, status: int, code: str
) -> None:
    response = call(verb, f"{PROJECT}/{path}", body)
    assert (response.status_code, response.json()["error"]["status"]) == (status, code)


FIELDS = st.sampled_from(
    [
        "topic", "messages", "data", "attributes", "pushConfig", "pushEndpoint", "filter", "retryPolicy", "labels",
        "minimumBackoff", "deadLetterPolicy", "deadLetterTopic", "ackDeadlineSeconds", "ackIds", "time", "snapshot",
        "maxMessages", "subscription", "updateMask", "name", "expirationPolicy", "ttl", "messageRetentionDuration",
    ]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS | st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
PATHS = st.sampled_from(
    [
        ("PUT", "topics/abc"), ("PATCH", "topics/abc"), ("POST", "topics/abc:publish"), ("PUT", "subscriptions/abc"),
        ("PATCH", "subscriptions/abc"), ("POST", "subscriptions/abc:pull"), ("POST", "subscriptions/abc:acknowledge"),
        ("POST", "subscriptions/abc:modifyAckDeadline"), ("POST", "subscriptions/abc:seek"),
        ("POST", "subscriptions/abc:modifyPushConfig"), ("PUT", "snapshots/abc"), ("POST", "subscriptions/abc:detach"),
        ("GET", "topics"), ("DELETE", "subscriptions/abc"), ("GET", "snapshots/%00"), ("PUT", "topics/%ff%fe"),
    ]
)  # fmt: skip


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    PATHS,
    st.dictionaries(FIELDS, JSON, max_size=5).map(json.dumps) | JSON.map(json.dumps) | st.binary(max_size=40)
    | st.just("[" * 100_000) | st.just('{"labels": {"a": "\\ud800"}}'),
)  # fmt: skip
def test_malformed_requests_are_refused_not_failed(
    call: Callable[..., requests.Response], path: tuple[str, str], body: str | bytes
) -> None:
    response = call(path[0], f"{PROJECT}/{path[1]}", data=body)
    assert response.status_code < 500, response.text


@pytest.mark.slow
def test_gcloud_pubsub(pubsub: PubSub, tmp_path: Path, run_gcloud: RunGcloud) -> None:
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    assert pubsub.server is not None
    environment = os.environ | {
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_PUBSUB": f"{pubsub.server.url}/",
        "CLOUDSDK_CORE_PROJECT": "test-project",
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
    }

    def gcloud(*arguments: str) -> Any:
        done = run_gcloud(["pubsub", *arguments, "--format=json"], environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout or "null")

    gcloud("topics", "create", "requests")
    gcloud(
        "subscriptions", "create", "jobs", "--topic=requests", '--message-filter=attributes.kind="job"',
        "--ack-deadline=30", "--min-retry-delay=10s", "--enable-message-ordering", "--expiration-period=never",
    )  # fmt: skip
    gcloud("topics", "publish", "requests", "--message=ignored")
    gcloud("topics", "publish", "requests", "--message=hello", "--attribute=kind=job")
    (received,) = gcloud("subscriptions", "pull", "jobs", "--auto-ack", "--limit=5")
    assert base64.b64decode(received["message"]["data"]) == b"hello"
    assert [topic["name"] for topic in gcloud("topics", "list")] == [f"{PROJECT}/topics/requests"]
    assert gcloud("subscriptions", "pull", "jobs", "--auto-ack") == []
    gcloud("subscriptions", "update", "jobs", "--ack-deadline=60")
    assert gcloud("subscriptions", "describe", "jobs")["ackDeadlineSeconds"] == 60
    gcloud("subscriptions", "seek", "jobs", "--time=2020-01-01T00:00:00Z")
    gcloud("subscriptions", "delete", "jobs")
    gcloud("topics", "delete", "requests")
    assert gcloud("topics", "list") == []
