"""SIGTERM and the deadline, told to the training as one request to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

# What stopping takes: a step, a checkpoint, its upload, the last event. Cloud Run kills 10 s after SIGTERM.
DEADLINE_MARGIN_SECONDS = 30.0
UPLOAD_SECONDS = 6.0  # at least, however short the time is: without its upload a checkpoint is worth nothing
UPLOAD_MARGIN_SECONDS = 4.0
RANKS_MARGIN_SECONDS = 3.0  # what the process that started the ranks needs after they have ended
EVENT_SECONDS = 2.0

Reason = Literal["preempted", "deadline"]


class Stopped(BaseException):
    """Raised in the main thread when the container must end. Not an Exception, so that no library swallows it."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class StopRequest:
    """Raises Stopped as soon as somebody asks the process to end, or, while `deferred`, notes it in `reason`."""

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self.agreed = False
        self._armed = False
        self._stop_at: float | None = None

    def arm(self, deadline: float | None, *, wake: bool = True) -> None:
        """Listen for SIGTERM and SIGINT, and `wake` before the deadline (Unix seconds), unless somebody else does."""
        self._armed = True
        self._stop_at = None if deadline is None else deadline - DEADLINE_MARGIN_SECONDS
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_signal)
        if self._stop_at is not None and wake:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, self._stop_at - time.time()))

    def seconds_left(self, grace_seconds: float) -> float:
        """Between a request to stop and the end that nothing survives."""
        return DEADLINE_MARGIN_SECONDS if self.reason == "deadline" else grace_seconds

    def agree(self) -> None:
        """All ranks stop here, because one of them was asked to."""
        self.agreed = True
        self.reason = self.reason or self._why()

    def disarm(self) -> None:
        """From here on a request to stop is too late; `reason` still tells of it."""
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a request only sets `reason`; on the way out it raises Stopped."""
        self._armed = False
        try:
            yield
        finally:
            self._armed = True
        if self.reason is not None:
            self._armed = False
            raise Stopped(self.reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or self._why()
        if self._armed:
            self._armed = False  # once: what cleans up must not be interrupted in turn
            raise Stopped(self.reason)

    def _why(self) -> Reason:
        """Ranks are stopped by a signal at the deadline too. A second for the clocks of several machines."""
        return "deadline" if self._stop_at is not None and time.time() > self._stop_at - 1 else "preempted"
