"""Turns SIGTERM and the deadline into one request to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

from dropforge.base.clock import Clock

# Stopping takes a step, a checkpoint, its upload and the last event. Cloud Run kills 10 s after SIGTERM.
DEADLINE_MARGIN_SECONDS = 30.0
UPLOAD_SECONDS = 6.0  # the least, however short the grace time is: an unfinished upload is worth nothing
UPLOAD_MARGIN_SECONDS = 4.0
RANKS_MARGIN_SECONDS = 3.0  # for the process that started the ranks, after the ranks ended
EVENT_SECONDS = 2.0

Reason = Literal["preempted", "deadline"]


class Stopped(BaseException):
    """Raised in the main thread when the container must end. Not an Exception, so that no library swallows it."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class StopRequest:
    """Raises Stopped when a signal or the deadline asks the process to end; while `deferred`, only sets `reason`.

    `agreed` is whether all ranks stopped at the same step.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.reason: Reason | None = None
        self._clock = clock or Clock()
        self.agreed = False
        self._armed = False
        self._stop_at: float | None = None

    def arm(self, deadline: float | None, *, wake: bool = True) -> None:
        """Listen for SIGTERM and SIGINT; with `wake`, also for a timer before the deadline (Unix seconds)."""
        self._armed = True
        self._stop_at = None if deadline is None else deadline - DEADLINE_MARGIN_SECONDS
        self.listen()
        if self._stop_at is not None and wake:
            self.wake_after(max(0.001, self._stop_at - self._now()))

    def seconds_left(self, grace_seconds: float) -> float:
        """Seconds between a request to stop and the forced end of the container."""
        return DEADLINE_MARGIN_SECONDS if self.reason == "deadline" else grace_seconds

    def agree(self) -> None:
        """Record that all ranks stop at this step because a rank was asked to."""
        self.agreed = True
        self.reason = self.reason or self._current_reason()

    def disarm(self) -> None:
        """From now on a request to stop only sets `reason`."""
        self._armed = False
        self.wake_after(0)

    def listen(self) -> None:
        """Call `on_signal` for each signal of this process that asks it to stop."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self.on_signal)

    def wake_after(self, seconds: float) -> None:
        """Send this process a signal after so many seconds; 0: send none."""
        signal.setitimer(signal.ITIMER_REAL, seconds)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block a request only sets `reason`; at the end of the block it raises Stopped."""
        self._armed = False
        try:
            yield
        finally:
            self._armed = True
        if self.reason is not None:
            self._armed = False
            raise Stopped(self.reason)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note the request to stop, and raise Stopped if this request is armed."""
        self.reason = self.reason or self._current_reason()
        if self._armed:
            self._armed = False  # once: a second signal must not interrupt the clean-up
            raise Stopped(self.reason)

    def _current_reason(self) -> Reason:
        """A signal at the deadline means the deadline: ranks get a signal then, too. The clocks may differ by 1 s."""
        return "deadline" if self._stop_at is not None and self._now() > self._stop_at - 1 else "preempted"

    def _now(self) -> float:
        return self._clock.now().timestamp()
