"""`googleapis.*` calls: methods of Google's discovery documents, sent as REST, long-running operations awaited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .errors import system_error
from .machine import Wait
from .values import Value

if TYPE_CHECKING:
    from .effects import Later
    from .engine import Engine


class Connectors:
    def __init__(self, endpoints: Mapping[str, str]) -> None:
        self._endpoints = endpoints

    async def perform(self, engine: Engine, wait: Wait, effect_id: str) -> Value | Later:
        raise system_error("SystemError", f"connector {wait.call} is not available")
