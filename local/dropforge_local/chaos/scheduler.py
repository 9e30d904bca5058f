"""One clock, one queue of events, and processes that are suspended at every effect (each call of a client).

A process (an instance of a function) is ordinary blocking code. It has a thread for its stack, but exactly one thread
runs at any moment. A process that must wait takes events from the queue until another process is due, and hands its
turn over. So processes interleave at every effect, in the same way for the same seed.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

START = 1_767_225_600.0  # 2026-01-01T00:00:00Z


class Killed(BaseException):
    """The process ends here, as by SIGKILL. It is a BaseException, so that the code under test does not handle it."""


class Process:
    """Blocking code that takes turns with all other processes. Once it is `dead`, it ends at its next effect."""

    gets_signals = False  # whether something may end its waits early

    def __init__(self, name: str, body: Callable[[], None], skew: float = 0.0) -> None:
        self.name = name
        self.body = body
        self.skew = skew  # seconds by which its machine's clock is ahead
        self.dead = False
        self.effects = 0
        self.kill_at: tuple[int, bool] | None = None  # the effect at which it dies, and whether that is executed
        self.turn: threading.Lock | None = None  # None: not started

    def waits(self, wake: Callable[[], None]) -> None:
        """A wait begins that `wake` ends."""

    def handle_signals(self) -> None:
        """Called whenever the process continues after a wait."""


class _Worker(threading.Thread):
    """A thread that runs one process after another."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="chaos")
        self.turn = threading.Lock()
        self.turn.acquire()
        self.first: tuple[Scheduler, Process] | None = None
        self.start()

    def run(self) -> None:
        while True:
            self.turn.acquire()
            assert self.first is not None, "a worker is woken with work"
            scheduler, process = self.first
            following = scheduler.live(process)
            while following.turn is None:  # run it on this thread: handing the turn over costs more than most effects
                following.turn = self.turn
                following = scheduler.live(following)
            self.first = None
            _IDLE.append(self)
            following.turn.release()


_IDLE: list[_Worker] = []  # threads outlive a seed: making a thread costs more than many turns


class Scheduler:
    """The queue. `now` advances when an event is taken from it, or when a process waits and nothing else is due."""

    def __init__(self) -> None:
        self.now = START
        self.failure: BaseException | None = None
        self.main = Process("main", lambda: None)
        self.main.turn = threading.Lock()
        self.main.turn.acquire()
        self.current = self.main
        self._queue: list[tuple[float, int, Callable[[], None] | Process]] = []
        self._order = itertools.count()
        self._horizon = START
        self._living: dict[Process, None] = {}

    def at(self, when: float, event: Callable[[], None] | Process) -> None:
        """Call `event`, or continue a process, at a time, after everything that is already due then."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), event))

    def after(self, delay: float, event: Callable[[], None] | Process) -> None:
        self.at(self.now + delay, event)

    def spawn(self, process: Process, delay: float = 0.0) -> None:
        self._living[process] = None
        self.after(delay, process)

    def run(self, until: float) -> None:
        """Let time pass until a moment. Raises an exception that an event or a process did not handle."""
        self._horizon = until
        self._give_way(self.main)
        if self.failure is not None:
            raise self.failure
        self.now = max(self.now, until)

    def wait(self, seconds: float) -> None:
        """Suspend the current process. Raises Killed if the process dies meanwhile."""
        process, due = self.current, self.now + seconds
        if process is self.main:
            raise RuntimeError("an event cannot wait: only a process can")
        if process.gets_signals:
            return self.wait_for([], seconds)
        if not process.dead:
            if due <= self._horizon and (not self._queue or self._queue[0][0] > due):
                self.now = due  # nothing else is due before
            else:
                self.at(due, process)
                self._give_way(process)
        if process.dead:
            raise Killed(process.name)
        return None

    def wait_for(self, wakers: list[Callable[[], None]], seconds: float | None) -> None:
        """Suspend the current process until something calls the waker that this adds, or for `seconds`.

        Raises Killed if the process dies meanwhile.
        """
        process, is_over = self.current, False
        if process.dead:
            raise Killed(process.name)

        def wake() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self.after(0, process)

        wakers.append(wake)
        process.waits(wake)
        if seconds is not None:
            self.after(seconds, wake)
        self._give_way(process)
        wakers.remove(wake)
        if process.dead:
            raise Killed(process.name)
        process.handle_signals()

    def close(self) -> None:
        """End every waiting process and drop every event."""
        self.failure = None
        self._queue.clear()
        for process in list(self._living):
            process.dead = True
            if process.turn is not None:
                self._queue.append((self._horizon, next(self._order), process))
                self._give_way(self.main)
                self._queue.clear()
        self._living.clear()

    def _give_way(self, mine: Process) -> None:
        """Take events until `mine` is due. `main` is due when nothing else is."""
        following = self._next()
        if following is not mine:
            assert mine.turn is not None, "it runs"
            (following.turn or self._begin(following)).release()
            mine.turn.acquire()
        self.current = mine

    def _next(self) -> Process:
        """Take events until a process is due. The process may not have started."""
        while self.failure is None and self._queue and self._queue[0][0] <= self._horizon:
            self.now, _, event = heapq.heappop(self._queue)
            if isinstance(event, Process):
                if event.turn is not None or not event.dead:
                    return event
                self._living.pop(event, None)
                continue
            self.current = self.main
            try:
                event()
            except BaseException as failure:  # noqa: BLE001  # of the simulation itself: `run` raises it
                self.failure = failure
        return self.main

    def _begin(self, process: Process) -> threading.Lock:
        worker = _IDLE.pop() if _IDLE else _Worker()
        worker.first = self, process
        process.turn = worker.turn
        return worker.turn

    def live(self, process: Process) -> Process:
        """Run a process on its worker's thread; returns the process that is due next."""
        self.current = process
        try:
            process.body()
        except Killed:
            pass  # a planned death; the history shows its effects
        except BaseException as failure:  # noqa: BLE001  # of the code under test: `run` raises it
            self.failure = failure
        self._living.pop(process, None)
        return self._next()
