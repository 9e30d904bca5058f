"""Notifications of a bucket, with the clients of Cloud Storage and Pub/Sub on one server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api_core import exceptions
from google.cloud import pubsub_v1, storage

from dropforge_local.base.clock import SystemClock
from dropforge_local.base.db import Database
from dropforge_local.base.server import BackgroundServer
from dropforge_local.emulators.pubsub import PubSubEmulator
from dropforge_local.emulators.storage import StorageEmulator

from .conftest import make_client

TOPIC, SUBSCRIPTION = "projects/local-project/topics/changes", "projects/local-project/subscriptions/changes"


@dataclass
class Cloud:
    """Cloud Storage and Pub/Sub, with a topic and its subscription."""

    bucket: storage.Bucket
    publisher: Any
    subscriber: Any

    def received(self, count: int) -> list[Any]:
        """The next messages, in the order of their publication."""
        found: list[Any] = []
        while len(found) < count:
            response = self.subscriber.pull(subscription=SUBSCRIPTION, max_messages=10)
            found += [item.message for item in response.received_messages]
            ids = [item.ack_id for item in response.received_messages]
            self.subscriber.acknowledge(subscription=SUBSCRIPTION, ack_ids=ids)
        return sorted(found, key=lambda message: int(message.message_id))


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    def build() -> list[Any]:
        db, clock = Database(tmp_path / "state.db"), SystemClock()
        pubsub = PubSubEmulator(db, clock)
        return [StorageEmulator(db, tmp_path / "blobs", clock, topics=pubsub), pubsub]

    with BackgroundServer(build) as server, grpc.insecure_channel(server.grpc_address) as channel:
        publisher_class, subscriber_class = pubsub_v1.PublisherClient, pubsub_v1.SubscriberClient
        publisher = publisher_class(transport=publisher_class.get_transport_class()(channel=channel))
        subscriber = subscriber_class(transport=subscriber_class.get_transport_class()(channel=channel))
        publisher.create_topic(name=TOPIC)
        subscriber.create_subscription(name=SUBSCRIPTION, topic=TOPIC)
        client = make_client(server.url)
        yield Cloud(client.create_bucket("the-bucket"), publisher, subscriber)
        client.close()


def notify(cloud: Cloud, **options: Any) -> Any:
    notification = cloud.bucket.notification("changes", topic_project="local-project", **options)
    notification.create()
    return notification


def test_a_notification_is_created_listed_read_and_deleted(cloud: Cloud) -> None:
    made = notify(cloud, custom_attributes={"a": "b"}, event_types=["OBJECT_FINALIZE"], blob_name_prefix="in/")
    [listed] = cloud.bucket.list_notifications()
    assert (made.notification_id, listed.notification_id) == ("1", "1")
    assert (listed.topic_name, listed.topic_project) == ("changes", "local-project")
    assert (listed.custom_attributes, listed.event_types) == ({"a": "b"}, ["OBJECT_FINALIZE"])
    assert (listed.blob_name_prefix, listed.payload_format) == ("in/", "NONE")
    assert cloud.bucket.get_notification("1").etag == made.etag
    made.delete()
    assert list(cloud.bucket.list_notifications()) == []
    assert not made.exists()


def test_changes_are_published_as_google_describes_them(cloud: Cloud) -> None:
    notify(cloud, payload_format="JSON_API_V1", custom_attributes={"who": "me"})
    blob = cloud.bucket.blob("specs/a.json")
    blob.upload_from_string(b"{}", content_type="application/json")
    first = blob.generation
    blob.upload_from_string(b"[]", content_type="application/json")
    second = blob.generation
    blob.metadata = {"k": "v"}
    blob.patch()
    blob.delete()
    messages = cloud.received(5)
    assert [message.attributes["eventType"] for message in messages] == [
        "OBJECT_FINALIZE",
        "OBJECT_DELETE",
        "OBJECT_FINALIZE",
        "OBJECT_METADATA_UPDATE",
        "OBJECT_DELETE",
    ]
    assert messages[1].attributes["overwrittenByGeneration"] == str(second)
    assert messages[2].attributes["overwroteGeneration"] == str(first)
    assert not any("overwr" in name for at in (0, 3, 4) for name in messages[at].attributes)
    resource = json.loads(messages[3].data)
    assert (resource["metadata"], resource["metageneration"]) == ({"k": "v"}, "2")
    assert dict(messages[0].attributes) == {
        "who": "me",
        "notificationConfig": "projects/_/buckets/the-bucket/notificationConfigs/1",
        "eventType": "OBJECT_FINALIZE",
        "payloadFormat": "JSON_API_V1",
        "bucketId": "the-bucket",
        "objectId": "specs/a.json",
        "objectGeneration": str(first),
        "eventTime": json.loads(messages[0].data)["updated"],
    }


def test_a_notification_is_of_its_events_and_its_prefix_alone(cloud: Cloud) -> None:
    notify(cloud, event_types=["OBJECT_DELETE"], blob_name_prefix="in/")
    for name in ("out/a", "in/a"):
        cloud.bucket.blob(name).upload_from_string(b"x")
        cloud.bucket.blob(name).delete()
    [message] = cloud.received(1)
    assert (message.attributes["objectId"], message.attributes["eventType"], message.data) == (
        "in/a",
        "OBJECT_DELETE",
        b"",
    )


def test_a_deleted_topic_stops_no_upload(cloud: Cloud) -> None:
    notify(cloud)
    cloud.publisher.delete_topic(topic=TOPIC)
    cloud.bucket.blob("a").upload_from_string(b"x")
    assert cloud.bucket.blob("a").exists()


def test_wrong_notifications_are_refused(cloud: Cloud) -> None:
    with pytest.raises(exceptions.NotFound, match="projects/local-project/topics/none"):
        cloud.bucket.notification("none", topic_project="local-project").create()
    with pytest.raises(exceptions.BadRequest, match="event_types"):
        notify(cloud, event_types=["OBJECT_EATEN"])
    with pytest.raises(exceptions.BadRequest, match="payload_format"):
        notify(cloud, payload_format="XML")
