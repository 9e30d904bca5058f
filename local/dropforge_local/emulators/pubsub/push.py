"""Push delivery: a pump per push subscription, a bounded number of requests in flight, keep-alive connections."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import sqlite3
from collections.abc import Callable
from typing import Any

import aiohttp

from dropforge_local.base.clock import Clock

from ..kit.times import timestamp
from .backlog import Backlog, Delivery
from .resources import Resources, Subscription
from .wakes import Wakes, supervise, wait

log = logging.getLogger(__name__)

Token = Callable[[str, str], str]  # an identity token for an audience, of the account with an e-mail

MAX_IN_FLIGHT = 32
ACKNOWLEDGING = frozenset((102, 200, 201, 202, 204))
# A lease ends this long after the request's timeout, so that the two do not race.
LEASE_MARGIN_SECONDS = 1.0
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
HOP_HEADERS = frozenset(("connection", "content-length", "host", "transfer-encoding", "upgrade", "te", "trailer"))
MESSAGE_PUBLISHED = "google.cloud.pubsub.topic.v1.messagePublished"


class Pusher:
    """Delivers every push subscription's messages by HTTP POST."""

    def __init__(self, backlog: Backlog, resources: Resources, wakes: Wakes, clock: Clock, token: Token | None) -> None:
        self.backlog = backlog
        self.resources = resources
        self.wakes = wakes
        self.clock = clock
        self.token = token
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        # No limit here: each pump limits its own requests. No cookies, no automatic headers except the protocol's.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )
        for subscription in self.resources.push_subscriptions():
            self.ensure_pump(subscription)

    async def stop(self) -> None:
        pumps, self._pumps = list(self._pumps.values()), {}
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def ensure_pump(self, subscription: Subscription) -> None:
        """Start the pump of a push subscription unless it runs. It ends when the subscription is no longer pushed."""
        if subscription.is_push and subscription.id not in self._pumps and self._session is not None:
            pump = asyncio.get_running_loop().create_task(self._run_pump(subscription.id))
            self._pumps[subscription.id] = pump

    async def _run_pump(self, subscription_id: int) -> None:
        in_flight: set[asyncio.Task[None]] = set()
        try:
            await supervise(f"push of subscription {subscription_id}", lambda: self._pump(subscription_id, in_flight))
        finally:
            self._pumps.pop(subscription_id, None)
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    async def _pump(self, subscription_id: int, in_flight: set[asyncio.Task[None]]) -> None:
        with self.wakes.listen(subscription_id) as changed:
            while (subscription := self.resources.subscription_by_id(subscription_id)) and subscription.is_push:
                changed.clear()
                now = self.clock.now()
                for delivery in self._claim(subscription, MAX_IN_FLIGHT - len(in_flight), now):
                    task = asyncio.create_task(self._deliver(subscription, delivery))
                    in_flight.add(task)
                    task.add_done_callback(in_flight.discard)
                    task.add_done_callback(lambda done: changed.set())
                due = self.backlog.next_due(subscription, now) if len(in_flight) < MAX_IN_FLIGHT else None
                await wait(changed, self.clock, due)

    def _claim(self, subscription: Subscription, room: int, now: float) -> list[Delivery]:
        if room <= 0:
            return []
        lease_seconds = subscription.config.ack_deadline_seconds + LEASE_MARGIN_SECONDS
        return self.backlog.claim(subscription, room, lease_seconds, now, one_per_key=True)

    async def _deliver(self, subscription: Subscription, delivery: Delivery) -> None:
        """Send one request. A status in ACKNOWLEDGING acks the message; any other result is a nack."""
        acknowledged = await self._post(subscription, delivery)
        current = self.resources.subscription_by_id(subscription.id)
        if current is None:
            return
        try:
            if acknowledged:
                self.backlog.acknowledge(current, [delivery.ack_id])
            else:
                self.backlog.modify_deadline(current, [delivery.ack_id], 0)
        except sqlite3.Error:  # a full disk: the lease expires, and the message is delivered again
            log.exception("could not settle message %s of %s", delivery.message, current.name)

    async def _post(self, subscription: Subscription, delivery: Delivery) -> bool:
        assert self._session is not None
        push = subscription.config.push_config
        try:
            await self.backlog.db.durable()  # an endpoint must not see an event that a power cut could still undo
            headers, body = self._request(subscription, delivery)
            async with self._session.post(
                push.push_endpoint,
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=subscription.config.ack_deadline_seconds),
            ) as response:
                answer = await response.text(errors="replace")
                if response.status not in ACKNOWLEDGING:
                    log.info("push to %s was answered %s: %s", push.push_endpoint, response.status, answer[:200])
                return response.status in ACKNOWLEDGING
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            log.info("push of message %s to %s failed: %r", delivery.message, push.push_endpoint, error)
            return False

    def _request(self, subscription: Subscription, delivery: Delivery) -> tuple[dict[str, str], bytes]:
        push = subscription.config.push_config
        if subscription.cloud_event:
            headers, body = _cloud_event(subscription, delivery)
        elif push.WhichOneof("wrapper") == "no_wrapper":
            headers, body = _unwrapped(subscription, delivery)
        else:
            headers, body = {"content-type": "application/json"}, _wrapped(subscription, delivery)
        account = push.oidc_token.service_account_email
        if account and self.token is not None:
            headers["authorization"] = f"Bearer {self.token(push.oidc_token.audience or push.push_endpoint, account)}"
        return headers, body


def _wrapped(subscription: Subscription, delivery: Delivery) -> bytes:
    """The JSON that a push endpoint receives (https://cloud.google.com/pubsub/docs/push#receive_push)."""
    content, published = delivery.content, timestamp(delivery.published).ToJsonString()
    message: dict[str, Any] = {
        "data": base64.b64encode(content.data).decode(),
        "attributes": dict(content.attributes),
        "messageId": str(delivery.message),
        "message_id": str(delivery.message),
        "publishTime": published,
        "publish_time": published,
    }
    if content.ordering_key:
        message["orderingKey"] = content.ordering_key
    body: dict[str, Any] = {"message": message, "subscription": subscription.name}
    if subscription.max_delivery_attempts:
        body["deliveryAttempt"] = delivery.attempt
    return json.dumps(body).encode()


def _cloud_event(subscription: Subscription, delivery: Delivery) -> tuple[dict[str, str], bytes]:
    """Eventarc's form of the same body: a binary-mode CloudEvent with the message's id."""
    headers = {
        "ce-specversion": "1.0",
        "ce-id": str(delivery.message),
        "ce-source": f"//pubsub.googleapis.com/{subscription.topic}",
        "ce-type": MESSAGE_PUBLISHED,
        "ce-time": timestamp(delivery.published).ToJsonString(),
        "content-type": "application/json",
    }
    return headers, _wrapped(subscription, delivery)


def _unwrapped(subscription: Subscription, delivery: Delivery) -> tuple[dict[str, str], bytes]:
    """The raw data. With write_metadata, every attribute with a valid header name becomes a header."""
    headers = {"content-type": "application/octet-stream"}
    if subscription.config.push_config.no_wrapper.write_metadata:
        headers |= {
            "x-goog-pubsub-message-id": str(delivery.message),
            "x-goog-pubsub-publish-time": timestamp(delivery.published).ToJsonString(),
            "x-goog-pubsub-subscription-name": subscription.name,
        }
        if delivery.content.ordering_key:
            headers["x-goog-pubsub-ordering-key"] = _header_value(delivery.content.ordering_key)
        for name, value in delivery.content.attributes.items():
            if HEADER_NAME.fullmatch(name) and name.lower() not in HOP_HEADERS:
                headers[name.lower()] = _header_value(value)
    return headers, delivery.content.data


def _header_value(value: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f]", " ", value)
