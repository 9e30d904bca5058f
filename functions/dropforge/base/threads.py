"""How independent calls run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Threads:
    """A pool of threads for each call of `map`. A simulation passes its own pool, which uses one thread."""

    def map(self, call: Callable[[T], U], items: Iterable[T], workers: int) -> list[U]:
        """The result of `call` for each item, in the order of the items. Raises the first exception of a call."""
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(call, items))
