"""Ends a process whose training makes no step any more, and says where each of its threads stands.

A step of several hosts waits for all of them: if one host is lost without a sign, the others wait for ever.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from typing import Self

from dropforge.base.log import log

from .attempt import exit_now
from .errors import INTERNAL, JobError, infrastructure_error

VARIABLE = "DROPFORGE_STALL_SECONDS"  # replaces STALL_SECONDS
# The longest pause of a healthy training: the upload of a checkpoint waits for the upload before it, and for the other
# machines. Ranks wait as long in a collective (train_trl/ranks.py).
STALL_SECONDS = 1800.0
STEPS = 10  # a pause of so many steps is no stall yet, however long a step takes
FIRST_STEP_SECONDS = 3600.0  # the first step reads a checkpoint and compiles
TOLD_SHARE = 6  # the log has the stacks after this part of the time, too: the control plane may end the attempt earlier
TICK_SECONDS = 5.0
STDERR = 2


class Pause:
    """How long the training has made no step while this process ran, and how long that may last."""

    def __init__(self, stall: float = STALL_SECONDS, first: float = FIRST_STEP_SECONDS) -> None:
        self.seconds = 0.0
        self._stall, self._first = stall, first
        self._steps = 0
        self._longest = 0.0

    @property
    def limit(self) -> float:
        """The seconds after which the training is stalled."""
        return max(self._stall, STEPS * self._longest) if self._steps else max(self._stall, self._first)

    def passed(self, seconds: float) -> None:
        """Time has passed between two ticks; if it is much longer than a tick, this process did not run."""
        self.seconds += min(seconds, 2 * TICK_SECONDS)

    def stepped(self) -> None:
        """A step has ended. The time of the first step tells nothing about the others."""
        if self._steps:
            self._longest = max(self._longest, self.seconds)
        self._steps += 1
        self.seconds = 0.0

    def describe(self) -> str:
        steps = f"after {self._steps} steps, of which the longest took {self._longest:.0f} s"
        return f"no step for {self.seconds:.0f} s {steps if self._steps else 'since the training began'}"


class Watchdog:
    """Ends the process if no `step` comes in time: writes the stacks of all threads, calls `end`, and exits.

    Use it as a context around the training alone. A thread that holds the interpreter's lock for ever stops it, too.
    """

    def __init__(self, where: str, end: Callable[[JobError], None] = lambda error: None) -> None:
        self._where, self._end = where, end
        stall = os.environ.get(VARIABLE)
        self._pause = Pause(float(stall)) if stall else Pause()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def step(self) -> None:
        """The training has made a step."""
        with self._lock:
            self._pause.stepped()

    def _watch(self) -> None:
        told, began = False, time.monotonic()
        while not self._closed.wait(TICK_SECONDS):
            with self._lock:
                began, before = time.monotonic(), began
                self._pause.passed(began - before)
                seconds, limit, text = self._pause.seconds, self._pause.limit, self._pause.describe()
            if seconds > limit:
                self._stop(text)
            if seconds > limit / TOLD_SHARE and not told:
                self._tell(text, "WARNING")
            told = seconds > limit / TOLD_SHARE

    def _tell(self, text: str, severity: str) -> None:
        log(f"{self._where} has made {text}; the stacks of its threads follow", stage="train", severity=severity)
        faulthandler.dump_traceback(STDERR)

    def _stop(self, text: str) -> None:
        self._tell(text, "ERROR")
        hint = "the log has the stacks of its threads; dropforge resumes the run from its checkpoint"
        try:
            self._end(infrastructure_error(f"{self._where} stalled: {text}", hint))
        except Exception as error:  # noqa: BLE001  (the exit code tells the end, too)
            log(f"the stall was not reported: {error!r}", stage="train", severity="ERROR")
        exit_now(INTERNAL)
