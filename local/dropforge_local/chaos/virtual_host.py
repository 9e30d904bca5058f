"""The machine of a simulated container: its threads are processes of the scheduler, and it has signals and a clock."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from containers.common.host import Host
from containers.common.stop import StopRequest
from dropforge.base.threads import Threads

from .scheduler import Killed, Process
from .seam import WorldClock
from .world import World

T = TypeVar("T")
U = TypeVar("U")
LAST_EFFECT = 100  # at which a fault may kill a process


class Program:
    """The processes of one container: they end together. `died` is called if a fault kills one of them."""

    def __init__(
        self, world: World, name: str, run: str, is_over: Callable[[], bool], died: Callable[[], None]
    ) -> None:
        self.world = world
        self.name = name
        self.run = run
        self.is_over = is_over
        self.is_dead = False
        self.host = Host(WorldClock(world), VirtualThreads(self))
        self._died = died
        self._processes: list[_Task] = []

    def start(self, name: str, body: Callable[[], None]) -> _Task:
        """Start a process of the container. Its effects are those of a function that is called for the run."""

        def live() -> None:
            try:
                body()
            except Killed:
                if not self.is_dead and not self.is_over():
                    self.kill()
                    self._died()
                raise
            finally:
                self._processes.remove(task)

        task = _Task(self, f"{self.name}-{name}-{self.world.id()}", live)
        if self.world.happens(self.world.faults.killed):
            task.kill_at = (1 + self.world.random.randrange(LAST_EFFECT), self.world.random.random() < 0.5)
        self.world.fact("call", instance=task.name, run=self.run)
        self._processes.append(task)
        self.world.scheduler.spawn(task)
        return task

    def kill(self) -> None:
        """SIGKILL: every process ends at once."""
        self.is_dead = True
        for process in self._processes:
            process.wake()


class _Task(Process):
    """A process of a container."""

    gets_signals = True

    def __init__(self, program: Program, name: str, body: Callable[[], None]) -> None:
        self.program = program
        self.signals: list[Callable[[], None]] = []
        self.wake: Callable[[], None] = lambda: None
        self._is_dead = False
        super().__init__(name, body)

    @property
    def dead(self) -> bool:  # it dies with its container, too
        return self._is_dead or self.program.is_dead or self.program.is_over()

    @dead.setter
    def dead(self, value: bool) -> None:
        self._is_dead = value

    def waits(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def handle_signals(self) -> None:
        while self.signals:
            self.signals.pop(0)()

    def send(self, handler: Callable[[], None]) -> None:
        """Let the process call a handler, as Python does when a signal interrupts what the process waits for."""
        self.signals.append(handler)
        self.wake()


class VirtualStop(StopRequest):
    """The signals of a container's first process. `kill` is what a signal does before the process listens."""

    def __init__(self, program: Program, kill: Callable[[], None]) -> None:
        super().__init__(program.host.clock)
        self._program = program
        self._kill = kill
        self._listener: _Task | None = None
        self._timer = 0

    def listen(self) -> None:
        task = self._program.world.scheduler.current
        assert isinstance(task, _Task), "a container calls this"
        self._listener = task

    def wake_after(self, seconds: float) -> None:
        self._timer += 1
        number = self._timer
        if seconds:
            self._program.world.after(seconds, lambda: self.deliver() if number == self._timer else None)

    def deliver(self) -> None:
        """Send the signal."""
        if self._program.is_dead or self._program.is_over():
            return
        if self._listener is None:
            self._kill()
        else:
            self._listener.send(lambda: self.on_signal(0, None))


class VirtualThreads(Threads):
    """Threads that take turns, and what they wait for."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def map(self, call: Callable[[T], U], items: Iterable[T], workers: int) -> list[U]:
        return [call(item) for item in items]

    def start(self, name: str, body: Callable[[], None]) -> _Thread:
        return _Thread(self._program, name, body)

    def event(self) -> Any:
        return _Flag(self._program.world)

    def queue(self, size: int) -> Any:
        return _Queue(self._program.world, size)

    def lock(self) -> Any:
        return _Lock(self._program.world)


class _Flag:
    """threading.Event."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._wakers: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for wake in list(self._wakers):
            wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else self._world.now + timeout
        while not self._is_set and (until is None or self._world.now < until):
            self._world.scheduler.wait_for(self._wakers, None if until is None else until - self._world.now)
        return self._is_set


class _Thread:
    """threading.Thread, started."""

    def __init__(self, program: Program, name: str, body: Callable[[], None]) -> None:
        self._ended = _Flag(program.world)

        def live() -> None:
            try:
                body()
            finally:
                self._ended.set()

        program.start(name, live)

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


class _Queue:
    """queue.Queue."""

    def __init__(self, world: World, size: int) -> None:
        self._size = size
        self._items: deque[Any] = deque()
        self._changed = _Flag(world)

    def put(self, item: Any, timeout: float | None = None) -> None:
        if len(self._items) >= self._size:
            self._changed.clear()
            self._changed.wait(timeout)
        if len(self._items) >= self._size:
            raise queue.Full
        self._items.append(item)
        self._changed.set()

    def get(self, timeout: float | None = None) -> Any:
        if not self._items:
            self._changed.clear()
            self._changed.wait(timeout)
        if not self._items:
            raise queue.Empty
        self._changed.set()
        return self._items.popleft()


class _Lock:
    """threading.Lock, as a context."""

    def __init__(self, world: World) -> None:
        self._free = _Flag(world)
        self._free.set()

    def __enter__(self) -> None:
        while not self._free.is_set():
            self._free.wait()
        self._free.clear()

    def __exit__(self, *_: object) -> None:
        self._free.set()
