"""Whether a message about an endpoint would be refused now: the same checks as the function's, without a write.

A message is answered by a run event, which most publishers never read. So `dropforge serve` asks here first, and tells
the reason at once. The function decides: the endpoint may change in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

from dropforge.base.clock import Clock
from dropforge.context import Context
from dropforge.endpoints.record import EndpointRecord
from dropforge.endpoints.store import EndpointStore
from dropforge.run.events import Request
from dropforge.run.store import RunStore
from dropforge.spec.request import ServeRequest

from .elsewhere import is_elsewhere
from .messages import apply, read


def check_change(context: Context, content: dict[str, Any], topic: str) -> None:
    """Raises Refused for a message on a topic if the function would refuse it now. Changes nothing.

    It accepts every model of another deployment, of which the function makes a copy first. Raises DropforgeError and
    GoogleAPIError if the caller cannot read what the function reads.
    """
    change = read(content)
    if isinstance(change, ServeRequest) and is_elsewhere(context.settings, change.serve.run):
        return
    with suppress(Accepted):
        apply(Trial(context.cloud, context.platforms), content, Request(topic, "trial", "trial"))


class Accepted(Exception):
    """Every check has passed: a function would write the record now."""


class Trial(Context):
    @cached_property
    def endpoints(self) -> EndpointStore:
        return TrialStore(self.store, self.cloud.clock)


class TrialStore(EndpointStore):
    """Keeps the record of a new endpoint in memory, and writes nothing."""

    def __init__(self, bucket: RunStore, clock: Clock) -> None:
        super().__init__(bucket, clock)
        self._made: dict[str, EndpointRecord] = {}

    def record(self, endpoint: str) -> EndpointRecord:
        return self._made.get(endpoint) or super().record(endpoint)

    def create(self, record: EndpointRecord) -> None:
        if self.find(record.name) is None:
            self._made[record.name] = record

    def update(self, endpoint: str, change: Callable[[EndpointRecord], EndpointRecord]) -> EndpointRecord:
        change(self.record(endpoint))
        raise Accepted
