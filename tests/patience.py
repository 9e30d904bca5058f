"""How long a test waits for an event that comes unless the code is wrong. A slow machine must not decide a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE_SECONDS = 200.0
TRAIN_SECONDS = 1000.0  # for a training, which the suite runs at a low priority


def looks(seconds: float) -> Iterator[None]:
    """Yield for each look at what must come, until `seconds` are over.

    Sleeps a tenth of the time so far between two looks, 50 to 250 ms: a look at a stack costs 5 to 50 ms of the
    processor, which the awaited work needs.
    """
    began = time.monotonic()
    yield
    while (waited := time.monotonic() - began) < seconds:
        time.sleep(min(max(waited / 10, 0.05), 0.25))
        yield


def until(read: Callable[[], Any], accept: Callable[[Any], Any] = bool, seconds: float = PATIENCE_SECONDS) -> Any:
    """Call `read` until `accept` is true for its value; return that value. Fail after `seconds`."""
    value: Any = None
    for _ in looks(seconds):
        value = read()
        if accept(value):
            return value
    raise AssertionError(f"not accepted in time: {value}")
