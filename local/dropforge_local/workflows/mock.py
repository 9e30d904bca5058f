"""Canned answers for a workflow's calls, so that it can be tested without services (`run --mock FILE`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from .clock import Clock
from .values import Value


class Mocks(Protocol):
    """What the engine asks before it sends anything."""

    async def answer(self, call: str, step: str, arguments: Mapping[str, Value], clock: Clock) -> tuple[bool, Value]:
        """(True, value) to answer instead of the service, (False, None) to let the call go out."""
