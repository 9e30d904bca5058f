"""Threads, and what they wait for. A simulation passes its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from queue import Queue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Thread(Protocol):
    """A thread that has been started."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...


class Threads:
    """The threads of this process, and a pool of threads for each call of `map`."""

    def map(self, call: Callable[[T], U], items: Iterable[T], workers: int) -> list[U]:
        """The result of `call` for each item, in the order of the items. Raises the first exception of a call.

        After an interrupt (SIGTERM) it does not wait for the calls that still run.
        """
        pool = ThreadPoolExecutor(workers)
        try:
            results = list(pool.map(call, items))
        except BaseException as error:
            pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
            raise
        pool.shutdown()
        return results

    def start(self, name: str, body: Callable[[], None]) -> Thread:
        """Run `body` in a thread of its own. The end of the process does not wait for it."""
        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread

    def event(self) -> threading.Event:
        """A flag that threads wait for."""
        return threading.Event()

    def queue(self, size: int) -> Queue[Any]:
        """A queue of at most `size` items."""
        return Queue(size)

    def lock(self) -> AbstractContextManager[Any]:
        """A lock whose holder may wait for an answer."""
        return threading.Lock()
