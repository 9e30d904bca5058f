"""Pull and StreamingPull: lease and return messages, and wait for the next message without polling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
from google.cloud.pubsub_v1 import types

from dropforge_local.base.clock import Clock
from dropforge_local.base.errors import ApiError
from dropforge_local.iam import require

from ..kit.rpc import Message, abort
from ..kit.times import timestamp
from .backlog import Backlog, Delivery
from .permissions import CONSUME
from .resources import Resources, Subscription
from .rules import check_modified_deadline, check_stream_deadline, invalid
from .wakes import Wakes, wait

PubsubMessage = types.PubsubMessage.pb()
ReceivedMessage = types.ReceivedMessage.pb()
StreamingPullResponse = types.StreamingPullResponse.pb()
PULL_WAIT_SECONDS = 5.0  # the API promises an empty answer after "a bounded amount of time"
MAX_STREAM_BATCH = 250
MAX_PULL_BATCH = 1000


def pubsub_message(delivery: Delivery) -> Message:
    return PubsubMessage(
        data=delivery.content.data,
        attributes=delivery.content.attributes,
        message_id=str(delivery.message),
        publish_time=timestamp(delivery.published),
        ordering_key=delivery.content.ordering_key,
    )


def received_message(delivery: Delivery, subscription: Subscription) -> Message:
    attempt = delivery.attempt if subscription.max_delivery_attempts else 0
    return ReceivedMessage(ack_id=delivery.ack_id, message=pubsub_message(delivery), delivery_attempt=attempt)


@dataclass(eq=False)
class Outstanding:
    """The unsettled messages that a stream has sent, and the limits of its client (0: no limit)."""

    max_messages: int
    max_bytes: int
    leases: dict[int, int] = field(default_factory=dict)

    def room(self) -> int:
        """How many more messages the stream may send. The last message may exceed the bytes, as at Google."""
        if self.max_bytes > 0 and sum(self.leases.values()) >= self.max_bytes:
            return 0
        return (
            MAX_STREAM_BATCH if self.max_messages <= 0 else min(MAX_STREAM_BATCH, self.max_messages - len(self.leases))
        )


class Puller:
    """Serves Pull and StreamingPull from a backlog."""

    def __init__(self, backlog: Backlog, resources: Resources, wakes: Wakes, clock: Clock) -> None:
        self.backlog = backlog
        self.resources = resources
        self.wakes = wakes
        self.clock = clock
        self.stopping = False
        self._owners: dict[int, Outstanding] = {}

    def stop(self) -> None:
        self.stopping = True
        self.wakes.wake_all()

    def release(self, leases: Sequence[int]) -> None:
        """Free the room that ended leases took in their streams."""
        for lease in leases:
            if owner := self._owners.pop(lease, None):
                owner.leases.pop(lease, None)

    async def pull(self, name: str, max_messages: int, immediately: bool) -> list[Delivery]:
        """Lease ready messages. Wait up to PULL_WAIT_SECONDS for the first message, unless `immediately`."""
        if max_messages <= 0:
            raise invalid(f"max_messages is {max_messages}; expected a positive number")
        subscription = self._pullable(name)
        give_up = self.clock.now() + (0 if immediately else PULL_WAIT_SECONDS)
        with self.wakes.listen(subscription.id) as changed:
            while True:
                changed.clear()
                now = self.clock.now()
                lease_seconds = subscription.config.ack_deadline_seconds
                batch = self.backlog.claim(subscription, min(max_messages, MAX_PULL_BATCH), lease_seconds, now)
                if batch or self.stopping or now >= give_up:
                    return batch
                due = self.backlog.next_due(subscription, now)
                await wait(changed, self.clock, give_up if due is None else min(due, give_up))
                subscription = self._pullable(name)

    async def streaming_pull(
        self, requests: AsyncIterator[Message], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Message]:
        """The StreamingPull RPC: the client sends acks and deadlines, the emulator sends messages."""
        try:
            async for response in self._stream(requests):
                yield response
        except ApiError as error:
            await abort(context, error)

    async def _stream(self, requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        first = await anext(aiter(requests), None)
        if first is None:
            return
        require(CONSUME, first.subscription)
        check_stream_deadline(first.stream_ack_deadline_seconds)
        subscription = self._pullable(first.subscription)
        outstanding = Outstanding(first.max_outstanding_messages, first.max_outstanding_bytes)
        with self.wakes.listen(subscription.id) as changed:
            inbox = _Inbox(self, first, changed)
            reader = asyncio.create_task(inbox.read(requests))
            try:
                async for response in self._send(subscription, outstanding, inbox, reader):
                    yield response
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
                for lease in outstanding.leases:
                    self._owners.pop(lease, None)

    async def _send(
        self, subscription: Subscription, outstanding: Outstanding, inbox: _Inbox, reader: asyncio.Task[None]
    ) -> AsyncIterator[Message]:
        while True:
            inbox.changed.clear()
            if self.stopping:
                raise ApiError("UNAVAILABLE", "the local stack is stopping")
            if reader.done() and not inbox.responses:
                reader.result()  # raises the error of an invalid request
                return  # the client has closed its side
            subscription = self._pullable(subscription.name)
            while inbox.responses:
                yield inbox.responses.pop(0)
            now = self.clock.now()
            room = outstanding.room()
            batch = self.backlog.claim(subscription, room, inbox.deadline_seconds, now) if room > 0 else []
            if batch:
                yield self._response(subscription, outstanding, batch)
            elif not inbox.responses:
                due = self.backlog.next_due(subscription, now) if room > 0 else None
                await wait(inbox.changed, self.clock, due)

    def _response(self, subscription: Subscription, outstanding: Outstanding, batch: list[Delivery]) -> Message:
        for delivery in batch:
            outstanding.leases[delivery.lease] = delivery.size_bytes
            self._owners[delivery.lease] = outstanding
        response = StreamingPullResponse(
            received_messages=[received_message(delivery, subscription) for delivery in batch]
        )
        response.subscription_properties.exactly_once_delivery_enabled = (
            subscription.config.enable_exactly_once_delivery
        )
        response.subscription_properties.message_ordering_enabled = subscription.ordered
        return response

    def _pullable(self, name: str) -> Subscription:
        subscription = self.resources.subscription(name)
        if subscription.config.detached:
            raise ApiError("FAILED_PRECONDITION", f"{name} is detached from its topic")
        if subscription.is_push:
            raise ApiError("FAILED_PRECONDITION", f"{name} has a push_endpoint; it cannot be pulled")
        return subscription


class _Inbox:
    """The requests of one stream: the client's current deadline, and the confirmations to send."""

    def __init__(self, puller: Puller, first: Message, changed: asyncio.Event) -> None:
        self.puller = puller
        self.first = first
        self.subscription = first.subscription
        self.changed = changed
        self.deadline_seconds = first.stream_ack_deadline_seconds
        self.responses: list[Message] = []

    async def read(self, requests: AsyncIterator[Message]) -> None:
        try:
            self._settle(self.first)
            async for request in requests:
                self._update(request)
                self._settle(request)
        finally:
            self.changed.set()

    def _update(self, request: Message) -> None:
        fixed = ("subscription", "max_outstanding_messages", "max_outstanding_bytes", "protocol_version")
        for name in fixed:
            if getattr(request, name) and getattr(request, name) != getattr(self.first, name):
                raise invalid(f"{name} can only be set on the first request of a stream")
        if request.stream_ack_deadline_seconds:
            check_stream_deadline(request.stream_ack_deadline_seconds)
            self.deadline_seconds = request.stream_ack_deadline_seconds

    def _settle(self, request: Message) -> None:
        """Apply the request's acks and deadlines; confirm them with exactly-once delivery."""
        deadlines, ids = request.modify_deadline_seconds, request.modify_deadline_ack_ids
        if len(deadlines) != len(ids):
            raise invalid(f"{len(deadlines)} modify_deadline_seconds for {len(ids)} modify_deadline_ack_ids")
        if not request.ack_ids and not ids:
            return
        backlog = self.puller.backlog
        subscription = self.puller.resources.subscription(self.subscription)
        refused_acks = backlog.acknowledge(subscription, request.ack_ids)
        refused = []
        for seconds, ack_id in zip(deadlines, ids, strict=True):
            check_modified_deadline(seconds)
            refused += backlog.modify_deadline(subscription, [ack_id], seconds)
        if subscription.config.enable_exactly_once_delivery:
            self._confirm(request, refused_acks, refused)

    def _confirm(self, request: Message, refused_acks: list[str], refused: list[str]) -> None:
        response = StreamingPullResponse()
        response.subscription_properties.exactly_once_delivery_enabled = True
        if request.ack_ids:
            acks = response.acknowledge_confirmation
            acks.ack_ids.extend(ack_id for ack_id in request.ack_ids if ack_id not in refused_acks)
            acks.invalid_ack_ids.extend(refused_acks)
        if request.modify_deadline_ack_ids:
            deadlines = response.modify_ack_deadline_confirmation
            deadlines.ack_ids.extend(ack_id for ack_id in request.modify_deadline_ack_ids if ack_id not in refused)
            deadlines.invalid_ack_ids.extend(refused)
        self.responses.append(response)
        self.changed.set()
