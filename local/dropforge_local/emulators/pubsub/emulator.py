"""The Pub/Sub emulator: wiring, set-up calls for the stack, and the timer that ends leases and retentions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.cloud.pubsub_v1 import types

from dropforge_local.base.clock import Clock
from dropforge_local.base.db import Database

from ..kit import rpc
from ..kit.background import Background, stop_all
from ..kit.emulator import RpcEmulator
from . import schemas
from .backlog import Backlog, Content, Undelivered
from .faults import DeliveryFaults
from .pull import PubsubMessage, Puller, StreamingPullResponse
from .push import Pusher, Token
from .resources import Resources, Subscription, SubscriptionConfig, Topic
from .rules import check_messages, check_topic
from .service import MUTABLE_SUBSCRIPTION_FIELDS, PubSubService, services
from .wakes import Wakes, supervise, wait


class PubSubEmulator(RpcEmulator):
    """google.pubsub.v1 over gRPC and REST. `token(audience, e-mail)` returns the token of a push with `oidc_token`."""

    def __init__(self, db: Database, clock: Clock, token: Token | None = None) -> None:
        self.db = db
        self.clock = clock
        self._resources = Resources(db)
        self._backlog = Backlog(db, clock, self._resources)
        self._wakes = Wakes()
        self._puller = Puller(self._backlog, self._resources, self._wakes, clock)
        self._pusher = Pusher(self._backlog, self._resources, self._wakes, clock, token)
        self._service = PubSubService(self._resources, self._backlog, self._puller, self._subscription_changed)
        self._services = (*services(self._service), schemas.SERVICE)
        self._background = Background("Pub/Sub")
        self._timer_target: float | None = None
        self._timer_moved = asyncio.Event()
        self._backlog.wake = self._wakes.wake
        self._backlog.release = self._puller.release
        self._backlog.deadline = self._move_timer

    @property
    def faults(self) -> DeliveryFaults:
        """The faults of later deliveries; assign another value at any time."""
        return self._backlog.faults

    @faults.setter
    def faults(self, faults: DeliveryFaults) -> None:
        self._backlog.faults = faults

    def create_topic(self, name: str) -> None:
        """Create the topic unless it exists."""
        topic = Topic(name=name)
        check_topic(topic)
        if not self._resources.exists("topics", name):
            self._service.create_topic(topic)

    def has_topic(self, name: str) -> bool:
        """Whether the topic exists."""
        return self._resources.exists("topics", name)

    def create_subscription(
        self, name: str, topic: str, config: Mapping[str, Any] | None = None, *, cloud_event: bool = False
    ) -> None:
        """Create the subscription, or change it to this description; idempotent.

        `config` is the REST resource's JSON, such as {"pushConfig": {"pushEndpoint": url}}. A new topic, filter,
        ordering or `cloud_event` deletes the subscription with its backlog and creates it again.
        """
        wanted = rpc.parse_dict({**(config or {}), "name": name, "topic": topic}, SubscriptionConfig())
        with self.db.transaction():
            if not self._resources.exists("subscriptions", name):
                self._service.create_subscription(wanted, cloud_event)
                return
            current = self._resources.subscription(name)
            if _identity(current.config, current.cloud_event) != _identity(wanted, cloud_event):
                self.delete_subscription(name)
                self._service.create_subscription(wanted, cloud_event)
                return
            request = types.UpdateSubscriptionRequest.pb()(subscription=wanted)
            request.update_mask.paths.extend(sorted(MUTABLE_SUBSCRIPTION_FIELDS))
            self._service.update_subscription(request)

    def delete_subscription(self, name: str) -> None:
        """Delete the subscription if it exists."""
        if self._resources.exists("subscriptions", name):
            self._service.delete_subscription(types.DeleteSubscriptionRequest.pb()(subscription=name))

    def undelivered(self, subscription: str) -> Undelivered | None:
        """The messages of a subscription that nobody has acknowledged; None if there is no such subscription."""
        if not self._resources.exists("subscriptions", subscription):
            return None
        return self._backlog.undelivered(self._resources.subscription(subscription))

    def publish(self, topic: str, data: bytes, attributes: Mapping[str, str] | None = None) -> str:
        """Publish a message and return its id. Inside a transaction, the message is delivered after the commit."""
        check_messages([PubsubMessage(data=data, attributes=attributes or {})])
        return self.enqueue(topic, data, attributes or {})

    def enqueue(self, topic: str, data: bytes, attributes: Mapping[str, str]) -> str:
        """Publish without the API's limits, for the platform's events, whose headers have names of any length."""
        return str(self._backlog.publish(topic, [Content(data, attributes)])[0])

    def grpc_handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        streaming_pull = grpc.stream_stream_rpc_method_handler(
            self._puller.streaming_pull,
            request_deserializer=types.StreamingPullRequest.pb().FromString,
            response_serializer=StreamingPullResponse.SerializeToString,
        )
        subscriber = self._services[1].name
        stream = grpc.method_handlers_generic_handler(subscriber, {"StreamingPull": streaming_pull})
        return [stream, *super().grpc_handlers()]

    async def start(self) -> None:
        self._backlog.recover()
        await self._pusher.start()
        self._background.spawn(supervise("the Pub/Sub timer", self._run_timer))

    async def stop(self) -> None:
        self._puller.stop()
        await stop_all(self._background.stop, self._pusher.stop)

    def _subscription_changed(self, subscription: Subscription) -> None:
        self._pusher.ensure_pump(subscription)
        self._wakes.wake(subscription.id)

    def _move_timer(self, when: float) -> None:
        if self._timer_target is None or when < self._timer_target:
            self._timer_moved.set()

    async def _run_timer(self) -> None:
        while True:
            self._timer_moved.clear()
            self._backlog.expire(self.clock.now())
            self._timer_target = self._backlog.next_expiry()
            await wait(self._timer_moved, self.clock, self._timer_target)


def _identity(config: rpc.Message, cloud_event: bool) -> tuple[object, ...]:
    return config.topic, config.filter, config.enable_message_ordering, cloud_event
