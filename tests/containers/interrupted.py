"""Raises a request to stop at a chosen place of a module, as the signal handler does between two instructions."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from containers.common.stop import Stopped


@contextmanager
def stopped_at(place: int, modules: Collection[ModuleType], *, within: str) -> Iterator[None]:
    """Inside the block, raise Stopped once, before the instruction with this number in the functions of `modules`.

    Counts from 0, while a function named `within` runs. The block also ends without Stopped, if it has no such place.
    """
    files = {module.__file__ for module in modules}
    before, left, inside = sys.gettrace(), place, 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left, inside
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        inside += {"call": 1, "return": -1}.get(event, 0) if frame.f_code.co_name == within else 0
        if event == "opcode" and inside:
            left -= 1
            if left == -1:
                raise Stopped("preempted")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
