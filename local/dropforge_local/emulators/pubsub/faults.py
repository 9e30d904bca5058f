"""Deliberate delivery faults: duplicates, lost first deliveries, reordering and delay, reproducible from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

REORDER_SECONDS = 0.5  # the longest extra delay of a reordered message


@dataclass(frozen=True)
class DeliveryFaults:
    """Shares (0..1) of a subscription's messages that have a fault; none by default.

    `duplicate`: the first acknowledgement is lost, and the message is delivered again. `drop_first`: the first delivery
    is lost and retried by the subscription's policy. `reorder`: the message is delayed by up to REORDER_SECONDS (never
    a message with an ordering key in an ordered subscription). `delay_seconds`: the delay of every message.
    """

    seed: int = 0
    duplicate: float = 0.0
    drop_first: float = 0.0
    reorder: float = 0.0
    delay_seconds: float = 0.0

    def duplicates(self, subscription: int, message: int) -> bool:
        return self._draw("duplicate", subscription, message) < self.duplicate

    def drops_first(self, subscription: int, message: int) -> bool:
        return self._draw("drop", subscription, message) < self.drop_first

    def hold_back_seconds(self, subscription: int, message: int, ordered: bool) -> float:
        if ordered or self._draw("reorder", subscription, message) >= self.reorder:
            return self.delay_seconds
        return self.delay_seconds + REORDER_SECONDS * self._draw("hold", subscription, message)

    def _draw(self, fault: str, subscription: int, message: int) -> float:
        # A function of the ids, not a generator with state: independent of other messages and of restarts.
        return random.Random(f"{self.seed}/{fault}/{subscription}/{message}").random()
