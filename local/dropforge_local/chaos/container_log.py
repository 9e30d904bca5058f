"""The warnings and errors that containers log, as facts of the history."""

from __future__ import annotations

import io
import json

from .world import World


class ContainerLog(io.TextIOBase):
    """A stderr whose lines of JSON become facts. Tracebacks are dropped: their paths differ between machines."""

    def __init__(self, world: World) -> None:
        self._world = world

    def write(self, text: str) -> int:
        for line in text.splitlines():
            entry = json.loads(line) if line.startswith("{") else {"severity": "INFO"}
            if entry["severity"] != "INFO":
                self._world.fact("container_log", stage=entry["stage"], message=entry["message"])
        return len(text)
