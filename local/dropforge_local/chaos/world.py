"""The base of the simulated cloud: time, chance, the history, and the effect (one call of a client)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import requests
from google.api_core.exceptions import DeadlineExceeded, GoogleAPIError, ServiceUnavailable

from .faults import Faults, Strike
from .history import History
from .scheduler import Killed, Process, Scheduler

T = TypeVar("T")
TIMEOUT_SECONDS = 30.0  # a client's time-out for a reply
PROJECT = "chaos-project"
LOCATION = "us-central1"


class World:
    """One life: with the faults of a seed, or with one strike and no other fault."""

    def __init__(self, seed: int, strike: Strike | None = None) -> None:
        self.random = random.Random(seed)
        self.history = History(seed)
        self.scheduler = Scheduler()
        self.faults = Faults() if strike else Faults.drawn(self.random)
        self.strike = strike
        self.actions: dict[
            str, Callable[[], None]
        ] = {}  # strikes that are not faults of a call: cancel, restart, sweep
        self.effects = 0
        self.calm = float("inf")  # from here on there are no faults
        self._ids = 0
        self._lasting: dict[str, bool] = {}

    @property
    def now(self) -> float:
        return self.scheduler.now

    def fact(self, kind: str, **data: Any) -> None:
        self.history.add(self.now, kind, data)

    def deleting(self, name: str) -> None:
        """Record the first request to delete a resource, and the process that makes it."""
        self.fact("deleting", name=name, by=self.scheduler.current.name)

    def happens(self, probability: float) -> bool:
        """Whether a fault strikes now. A fault that is off draws no random number."""
        return probability > 0 and self.now < self.calm and self.random.random() < probability

    def duration(self, slow: float, slowly: tuple[float, float], usually: tuple[float, float]) -> float:
        """Seconds that something takes: between the bounds `slowly` with the probability `slow`, else `usually`."""
        return self.random.uniform(*(slowly if self.happens(slow) else usually))

    def lasts(self, fault: str, probability: float) -> bool:
        """Whether a lasting fault is on: the same answer for `fault` as long as faults last."""
        if self.now >= self.calm:
            return False
        if fault not in self._lasting:
            self._lasting[fault] = self.happens(probability)
        return self._lasting[fault]

    def id(self) -> int:
        self._ids += 1
        return self._ids

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self.scheduler.after(delay, event)

    def effect(
        self,
        name: str,
        action: Callable[[], T],
        *,
        changes: bool = False,
        error: Callable[[bool], Exception] | None = None,
    ) -> T:
        """One call of a client. The process is suspended for it, and may die before the call or before the reply.

        `changes` says that the call is a write. `error(timed_out)` makes the exception of a failed call.
        """
        process = self.scheduler.current
        if process is self.scheduler.main:
            return action()
        process.effects += 1
        struck = self._struck(process)
        self._die(name, False)
        if struck == "stalled" or self.happens(self.faults.stalled):
            pause = self.random.uniform(30, 900)
            self.fact("fault", what="stalled", call=name, process=process.name, seconds=pause)
            self.scheduler.wait(pause)
        self.scheduler.wait(self.random.uniform(0.002, 0.05))
        faults, fail = self.faults, error or unavailable
        if struck == "refused" or self.happens(faults.refused):
            self.fact("fault", what="refused", call=name, process=process.name)
            raise fail(False)
        if changes and (struck == "late" or self.happens(faults.late)):
            self._do_late(name, action)
            self.scheduler.wait(TIMEOUT_SECONDS)
            raise fail(True)
        answer = _answer(action)
        self._die(name, True)
        if struck == "lost" or self.happens(faults.lost):
            self.fact("fault", what="lost", call=name, process=process.name)
            self.scheduler.wait(TIMEOUT_SECONDS)
            raise fail(True)
        self.scheduler.wait(self.random.uniform(0.002, 0.05))
        return answer()

    def act(self, action: str) -> None:
        """Strike by an action."""
        self.fact("struck", fault=action)
        self.actions[action]()

    def _struck(self, process: Process) -> str:
        """The fault of this life's strike, if this is its effect; else ""."""
        self.effects += 1
        if self.strike is None or self.strike.effect != self.effects:
            return ""
        fault = self.strike.fault
        if fault in ("killed_before", "killed_after"):
            process.kill_at = (process.effects, fault == "killed_after")
        elif fault in self.actions:
            self.after(0, lambda: self.act(fault))
            return fault
        self.fact("struck", fault=fault)
        return fault

    def _die(self, name: str, done: bool) -> None:
        process = self.scheduler.current
        if process.kill_at == (process.effects, done):
            process.dead = True
            self.fact("fault", what="killed", call=name, process=process.name, done=done)
            raise Killed(process.name)

    def _do_late(self, name: str, action: Callable[[], object]) -> None:
        """Execute a request later, after its sender has given it up."""
        delay = self.random.choice((1.0, 20.0, 40.0, 120.0, 600.0)) * self.random.uniform(0.5, 1.5)
        self.fact("fault", what="late", call=name, process=self.scheduler.current.name, seconds=delay)

        def arrive() -> None:
            self.fact("late", call=name, delay=delay)
            answer = _answer(action)
            if isinstance(answer, _Raised) and not isinstance(answer.error, GoogleAPIError):
                raise answer.error

        self.after(delay, arrive)


class _Raised:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self) -> Any:
        raise self.error


def _answer(action: Callable[[], T]) -> Callable[[], T]:
    """Run the action now; the returned function gives its result or raises its exception."""
    try:
        result = action()
    except GoogleAPIError as refusal:
        return _Raised(refusal)
    return lambda: result


def broken(timed_out: bool) -> Exception:
    """The exception of `requests` for a call that failed on the network."""
    return requests.ReadTimeout("timed out") if timed_out else requests.ConnectionError("connection reset")


def unavailable(timed_out: bool) -> Exception:
    """The exception of google.api_core for a call that failed on the network."""
    error: Exception = DeadlineExceeded("Deadline Exceeded")
    return error if timed_out else ServiceUnavailable("The service is unavailable.")
