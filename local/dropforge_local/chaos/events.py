"""Eventarc and Pub/Sub: they deliver events at least once, in any order, until the function acknowledges."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from cloudevents.http import CloudEvent

from dropforge.run.proof import EVENT_NAME, PROOF, proof

from .functions import Functions, event_of, topic_source
from .world import World

RETRY_SECONDS = (10.0, 600.0)  # the subscriptions' minimum and maximum backoff


class Events:
    """The publisher's client and the delivery to functions. Messages to other topics are only recorded."""

    def __init__(self, world: World, functions: Functions, subscribers: Mapping[str, str]) -> None:
        self.world = world
        self.functions = functions
        self.subscribers = subscribers  # entry point by the topic's short name

    def publish(self, topic: str, data: bytes, timeout: float = 0, **attributes: str) -> Any:
        """PublisherClient.publish; its future."""

        def result(timeout: float | None = None) -> str:
            return self.world.effect("pubsub.publish", lambda: self.accept(topic, data, attributes), changes=True)

        return SimpleNamespace(result=result)

    def accept(self, topic: str, data: bytes, attributes: Mapping[str, str]) -> str:
        """Store a message durably in its topic; returns the message id."""
        message, name = f"m{self.world.id():05d}", topic.rsplit("/", 1)[-1]
        if name in self.subscribers:
            encoded = {"data": base64.b64encode(data).decode(), "attributes": dict(attributes), "messageId": message}
            self.send(self.subscribers[name], event_of(topic_source(name), {"message": encoded}), {"message": message})
        else:
            self.world.fact("published", topic=name, id=attributes.get("ce-id", ""), event=json.loads(data))
        return message

    def job_event(self, event: dict[str, Any], key: str) -> None:
        """A container with its run's key publishes an event. A forged or malformed event may come with it."""
        content = json.dumps(event).encode()
        self.job_message(event, content, {PROOF: proof(key, EVENT_NAME, content)}, key)

    def job_message(self, event: dict[str, Any], content: bytes, attributes: Mapping[str, str], key: str) -> None:
        """A container publishes the message of an event. A forged or malformed event may come with it."""
        about = {"run": event["run"], "attempt": event["attempt"], "type": event["type"]}
        self._deliver("job-events", content, attributes, about, may_drop=True)
        if self.world.happens(self.world.faults.forged):
            self._to_subscriber("job-events", self._forged(event), {"forged": True}, key)

    def forge(self, event: dict[str, Any], key: str) -> None:
        """A hostile training container publishes an event, with its own run's key."""
        self._to_subscriber("job-events", event, {"forged": True}, key)

    def _forged(self, event: dict[str, Any]) -> dict[str, Any]:
        """A forged end: of another run, of another attempt, or with another shape."""
        ended = {key: event[key] for key in ("run", "attempt", "sequence", "time")} | {"type": "preempted", "step": 0}
        changes: tuple[dict[str, Any], ...] = (
            {"run": "nobody-0123456789ab"},
            {"attempt": event["attempt"] + 1 + self.world.random.randrange(3)},
            {"attempt": 1000, "type": "succeeded", "manifest_uri": "gs://elsewhere/MANIFEST.json"},
            {"type": "failed", "message": None},
        )
        return ended | self.world.random.choice(changes)

    def _to_subscriber(self, topic: str, value: dict[str, Any], about: dict[str, Any], key: str = "") -> None:
        content = json.dumps(value).encode()
        self._deliver(topic, content, {PROOF: proof(key, EVENT_NAME, content)} if key else {}, about)

    def _deliver(
        self,
        topic: str,
        content: bytes,
        attributes: Mapping[str, str],
        about: dict[str, Any],
        *,
        may_drop: bool = False,
    ) -> None:
        data = base64.b64encode(content).decode()
        message = {"message": {"data": data, "attributes": dict(attributes), "messageId": f"m{self.world.id():05d}"}}
        self.send(self.subscribers[topic], event_of(topic_source(topic), message), about, may_drop=may_drop)

    def send(self, entry_point: str, event: CloudEvent, about: dict[str, Any], *, may_drop: bool = False) -> None:
        """Deliver an event until it is acknowledged: now or later, once or more often."""
        world, faults = self.world, self.world.faults
        if may_drop and world.happens(faults.dropped):
            world.fact("fault", what="dropped", **about)
            return
        for _ in range(2 if world.happens(faults.duplicated) else 1):
            delay = world.random.uniform(0.02, 0.5)
            if world.happens(faults.delayed):
                delay = world.random.choice((5.0, 60.0, 600.0, 1800.0)) * world.random.random()
            world.after(delay, self._delivery(entry_point, event, about, RETRY_SECONDS[0]))

    def _delivery(self, entry_point: str, event: CloudEvent, about: dict[str, Any], pause: float) -> Callable[[], None]:
        def done(acknowledged: bool) -> None:
            if not acknowledged:
                again = self._delivery(entry_point, event, about, min(2 * pause, RETRY_SECONDS[1]))
                self.world.after(pause, again)

        return lambda: self.functions.deliver(entry_point, event, about, done)
