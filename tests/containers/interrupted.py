"""Raises a request to stop at a chosen place of some code, as the signal handler does between two instructions."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any, TypeVar

from containers.common.stop import Stopped

T = TypeVar("T")


class StopAt:
    """Calls a function, and raises Stopped before an instruction of `modules`, by its number from 0.

    `happened` says whether the call had so many instructions.
    """

    def __init__(self, place: int, modules: Collection[ModuleType]) -> None:
        self.happened = False
        self._left = place
        self._files = {module.__file__ for module in modules}

    def call(self, function: Callable[[], None]) -> None:
        """Call the function, which Stopped may end."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            with suppress(Stopped):
                function()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.happened:
            self.happened = self._left == 0
            self._left -= 1
            if self.happened:
                raise Stopped("preempted")
        return self._trace


def stopped_everywhere(work: Callable[[StopAt], T], *modules: ModuleType) -> Iterator[T]:
    """The results of `work` with a stop before each instruction of one call, and last its result without a stop."""
    for place in itertools.count():
        stop = StopAt(place, modules)
        yield work(stop)
        if not stop.happened:
            return
