"""The unary RPCs of google.pubsub.v1.Publisher and Subscriber, with their HTTP rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from google.cloud.pubsub_v1 import types
from google.protobuf import empty_pb2

from dropforge_local.base.errors import ApiError

from ..kit import masks
from ..kit.access import Guarded
from ..kit.paging import cut, read_token
from ..kit.rpc import Message, Service, methods
from ..kit.times import seconds_of, timestamp
from .backlog import Backlog, Content
from .permissions import NEEDS
from .pull import Puller, received_message
from .replay import MINIMUM_SNAPSHOT_SECONDS, Replay
from .resources import PAGING, Resources, Snapshot, Subscription, describe, not_found
from .rules import (
    check_messages,
    check_modified_deadline,
    check_name,
    check_project,
    check_topic,
    complete_push,
    complete_subscription,
    invalid,
)

Empty = empty_pb2.Empty
MUTABLE_TOPIC_FIELDS = frozenset(("labels", "message_storage_policy", "message_retention_duration"))
MUTABLE_SUBSCRIPTION_FIELDS = frozenset(
    (
        "push_config", "ack_deadline_seconds", "retain_acked_messages", "message_retention_duration", "labels",
        "expiration_policy", "dead_letter_policy", "retry_policy", "enable_exactly_once_delivery",
    )
)  # fmt: skip


class PubSubService:
    """A method per RPC, with the API's messages as argument and result.

    `pushes(subscription)` is called after commit for a subscription that may be a new push subscription.
    """

    def __init__(
        self, resources: Resources, backlog: Backlog, puller: Puller, pushes: Callable[[Subscription], None]
    ) -> None:
        self.resources = resources
        self.backlog = backlog
        self.puller = puller
        self.pushes = pushes
        self.replay = Replay(backlog)
        self.db = backlog.db

    # Publisher

    def create_topic(self, topic: Message) -> Message:
        check_topic(topic)
        self._check_new("topics", topic.name)
        topic.state = 1  # ACTIVE
        self.resources.save_topic(topic)
        return topic

    def update_topic(self, request: Message) -> Message:
        topic = self.resources.topic(request.topic.name)
        masks.merge(request.topic, topic, request.update_mask, MUTABLE_TOPIC_FIELDS)
        check_topic(topic)
        self.resources.save_topic(topic)
        return topic

    def publish(self, request: Message) -> Message:
        check_messages(request.messages)
        contents = [Content(m.data, dict(m.attributes), m.ordering_key) for m in request.messages]
        ids = self.backlog.publish(request.topic, contents)
        return types.PublishResponse.pb()(message_ids=map(str, ids))

    def get_topic(self, request: Message) -> Message:
        return self.resources.topic(request.topic)

    def list_topics(self, request: Message) -> Message:
        topics, token = self._page("topics", request)
        return types.ListTopicsResponse.pb()(topics=topics, next_page_token=token)

    def list_topic_subscriptions(self, request: Message) -> Message:
        self.resources.topic(request.topic)
        names, token = _page_of_names([item.name for item in self.resources.subscriptions_of(request.topic)], request)
        return types.ListTopicSubscriptionsResponse.pb()(subscriptions=names, next_page_token=token)

    def list_topic_snapshots(self, request: Message) -> Message:
        self.resources.topic(request.topic)
        names, token = _page_of_names(self.resources.snapshots_of(request.topic), request)
        return types.ListTopicSnapshotsResponse.pb()(snapshots=names, next_page_token=token)

    def delete_topic(self, request: Message) -> Message:
        with self.db.transaction():
            self.resources.topic(request.topic)
            self.resources.delete_topic(request.topic)
            self.backlog.drop_retained(request.topic)
        return Empty()

    def detach_subscription(self, request: Message) -> Message:
        with self.db.transaction():
            subscription = self.resources.subscription(request.subscription)
            subscription.config.detached = True
            self.resources.save_subscription(subscription.config, subscription.cloud_event)
            self.backlog.clear(subscription)
        return types.DetachSubscriptionResponse.pb()()

    # Subscriber

    def create_subscription(self, config: Message, cloud_event: bool = False) -> Message:
        complete_subscription(config)
        check_name(config.topic, "topics")
        with self.db.transaction():
            self._check_topics(config)
            self._check_new("subscriptions", config.name)
            config.ClearField("detached")
            subscription = self.resources.save_subscription(config, cloud_event)
            self.db.after_commit(lambda: self.pushes(subscription))
        return describe(subscription, self.resources)

    def get_subscription(self, request: Message) -> Message:
        return describe(self.resources.subscription(request.subscription), self.resources)

    def update_subscription(self, request: Message) -> Message:
        with self.db.transaction():
            subscription = self.resources.subscription(request.subscription.name)
            masks.merge(request.subscription, subscription.config, request.update_mask, MUTABLE_SUBSCRIPTION_FIELDS)
            complete_subscription(subscription.config)
            self._check_topics(subscription.config, dead_letter_only=True)
            self._save(subscription)
        return describe(self.resources.subscription(subscription.name), self.resources)

    def list_subscriptions(self, request: Message) -> Message:
        subscriptions, token = self._page("subscriptions", request)
        return types.ListSubscriptionsResponse.pb()(subscriptions=subscriptions, next_page_token=token)

    def delete_subscription(self, request: Message) -> Message:
        with self.db.transaction():
            subscription = self.resources.subscription(request.subscription)
            self.resources.delete_subscription(subscription)
            self.backlog.clear(subscription)
        return Empty()

    def modify_ack_deadline(self, request: Message) -> Message:
        check_modified_deadline(request.ack_deadline_seconds)
        subscription = self._with_ack_ids(request)
        refused = self.backlog.modify_deadline(subscription, request.ack_ids, request.ack_deadline_seconds)
        if subscription.config.enable_exactly_once_delivery:
            _refuse_ack_ids(refused)
        return Empty()

    def acknowledge(self, request: Message) -> Message:
        subscription = self._with_ack_ids(request)
        _refuse_ack_ids(self.backlog.acknowledge(subscription, request.ack_ids))
        return Empty()

    async def pull(self, request: Message) -> Message:
        batch = await self.puller.pull(request.subscription, request.max_messages, request.return_immediately)
        response = types.PullResponse.pb()()
        if batch:
            subscription = self.resources.subscription(request.subscription)
            response.received_messages.extend(received_message(delivery, subscription) for delivery in batch)
        return response

    def modify_push_config(self, request: Message) -> Message:
        with self.db.transaction():
            subscription = self.resources.subscription(request.subscription)
            subscription.config.push_config.CopyFrom(request.push_config)
            complete_push(subscription.config)
            self._save(subscription)
        return Empty()

    def seek(self, request: Message) -> Message:
        with self.db.transaction():
            subscription = self.resources.subscription(request.subscription)
            target = request.WhichOneof("target")
            if target == "time":
                self.replay.seek_to_time(subscription, seconds_of(request.time))
            elif target == "snapshot":
                if self.resources.snapshot(request.snapshot).topic != subscription.topic:
                    raise invalid(f"{request.snapshot} and {request.subscription} have different topics")
                self.replay.seek_to_snapshot(subscription, request.snapshot)
            else:
                raise invalid("seek has no target; expected time or snapshot")
        return types.SeekResponse.pb()()

    def create_snapshot(self, request: Message) -> Message:
        check_name(request.name, "snapshots")
        with self.db.transaction():
            subscription = self.resources.subscription(request.subscription)
            self._check_new("snapshots", request.name)
            newest, expires = self.replay.take_snapshot(request.name, subscription)
            if expires < self.backlog.now() + MINIMUM_SNAPSHOT_SECONDS:
                raise ApiError(
                    "FAILED_PRECONDITION", "the snapshot would expire in less than an hour: its backlog is old"
                )
            snapshot = Snapshot(name=request.name, topic=subscription.topic, labels=request.labels)
            snapshot.expire_time.CopyFrom(timestamp(expires))
            self.resources.save_snapshot(snapshot, newest, expires)
            self.db.after_commit(lambda: self.backlog.deadline(expires))
        return snapshot

    def get_snapshot(self, request: Message) -> Message:
        return self.resources.snapshot(request.snapshot)

    def list_snapshots(self, request: Message) -> Message:
        snapshots, token = self._page("snapshots", request)
        return types.ListSnapshotsResponse.pb()(snapshots=snapshots, next_page_token=token)

    def update_snapshot(self, request: Message) -> Message:
        with self.db.transaction():
            snapshot = self.resources.snapshot(request.snapshot.name)
            masks.merge(request.snapshot, snapshot, request.update_mask, frozenset(("labels",)))
            self.resources.save_snapshot(snapshot, 0, 0)
        return snapshot

    def delete_snapshot(self, request: Message) -> Message:
        with self.db.transaction():
            self.resources.snapshot(request.snapshot)
            self.resources.delete_snapshot(request.snapshot)
            self.backlog.collect(self.backlog.now())
        return Empty()

    def _page(self, collection: str, request: Message) -> tuple[list[Message], str]:
        check_project(request.project)
        return self.resources.page(collection, request)

    def _check_new(self, collection: str, name: str) -> None:
        if self.resources.exists(collection, name):
            raise ApiError("ALREADY_EXISTS", f"Resource already exists in the project (resource={name}).")

    def _check_topics(self, config: Message, dead_letter_only: bool = False) -> None:
        names = [] if dead_letter_only else [config.topic]
        if config.HasField("dead_letter_policy"):
            names.append(config.dead_letter_policy.dead_letter_topic)
        for name in names:
            if not self.resources.exists("topics", name):
                raise not_found(name)

    def _save(self, subscription: Subscription) -> None:
        saved = self.resources.save_subscription(subscription.config, subscription.cloud_event)
        self.backlog.apply_retention(saved)
        self.db.after_commit(lambda: self.pushes(saved))

    def _with_ack_ids(self, request: Message) -> Subscription:
        if not request.ack_ids:
            raise invalid("ack_ids is empty; expected at least one")
        return self.resources.subscription(request.subscription)


def services(implementation: PubSubService) -> tuple[Service, Service]:
    """The two gRPC services with their HTTP rules. The emulator adds StreamingPull, which REST lacks."""
    handlers = Guarded(implementation, NEEDS)
    return (
        Service("google.pubsub.v1.Publisher", PUBLISHER, handlers),
        Service("google.pubsub.v1.Subscriber", SUBSCRIBER, handlers),
    )


def _page_of_names(names: Sequence[str], request: Message) -> tuple[Sequence[str], str]:
    size, [last] = PAGING.size(request.page_size), read_token(request.page_token, [""])
    return cut([name for name in names if name > last][: size + 1], size, lambda name: [name])


def _refuse_ack_ids(refused: Sequence[str]) -> None:
    """Raise an error with each refused id in its details, where clients of exactly-once delivery look for it."""
    if refused:
        detail = {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": "PERMANENT_FAILURE_INVALID_ACK_ID",
            "domain": "pubsub.googleapis.com",
            "metadata": dict.fromkeys(refused, "PERMANENT_FAILURE_INVALID_ACK_ID"),
        }
        raise ApiError("FAILED_PRECONDITION", "some acknowledgement ids were invalid: they have expired", [detail])


PUBLISHER = methods(
    types,
    """
    CreateTopic(Topic) Topic PUT /v1/{name=projects/*/topics/*} *
    UpdateTopic() Topic PATCH /v1/{topic.name=projects/*/topics/*} *
    Publish() PublishResponse POST /v1/{topic=projects/*/topics/*}:publish *
    GetTopic() Topic GET /v1/{topic=projects/*/topics/*}
    ListTopics() ListTopicsResponse GET /v1/{project=projects/*}/topics
    ListTopicSubscriptions() ListTopicSubscriptionsResponse GET /v1/{topic=projects/*/topics/*}/subscriptions
    ListTopicSnapshots() ListTopicSnapshotsResponse GET /v1/{topic=projects/*/topics/*}/snapshots
    DeleteTopic() Empty DELETE /v1/{topic=projects/*/topics/*}
    DetachSubscription() DetachSubscriptionResponse POST /v1/{subscription=projects/*/subscriptions/*}:detach
    """,
)
SUBSCRIBER = methods(
    types,
    """
    CreateSubscription(Subscription) Subscription PUT /v1/{name=projects/*/subscriptions/*} *
    GetSubscription() Subscription GET /v1/{subscription=projects/*/subscriptions/*}
    UpdateSubscription() Subscription PATCH /v1/{subscription.name=projects/*/subscriptions/*} *
    ListSubscriptions() ListSubscriptionsResponse GET /v1/{project=projects/*}/subscriptions
    DeleteSubscription() Empty DELETE /v1/{subscription=projects/*/subscriptions/*}
    ModifyAckDeadline() Empty POST /v1/{subscription=projects/*/subscriptions/*}:modifyAckDeadline *
    Acknowledge() Empty POST /v1/{subscription=projects/*/subscriptions/*}:acknowledge *
    Pull() PullResponse POST /v1/{subscription=projects/*/subscriptions/*}:pull *
    ModifyPushConfig() Empty POST /v1/{subscription=projects/*/subscriptions/*}:modifyPushConfig *
    GetSnapshot() Snapshot GET /v1/{snapshot=projects/*/snapshots/*}
    ListSnapshots() ListSnapshotsResponse GET /v1/{project=projects/*}/snapshots
    CreateSnapshot() Snapshot PUT /v1/{name=projects/*/snapshots/*} *
    UpdateSnapshot() Snapshot PATCH /v1/{snapshot.name=projects/*/snapshots/*} *
    DeleteSnapshot() Empty DELETE /v1/{snapshot=projects/*/snapshots/*}
    Seek() SeekResponse POST /v1/{subscription=projects/*/subscriptions/*}:seek *
    """,
)
