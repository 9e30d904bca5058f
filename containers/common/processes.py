"""Work on all cores, in order, with a bounded part of it in memory."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from .errors import infrastructure_error

MAX_PROCESSES = 32  # each takes about 300 MB
AHEAD = 2  # parts for each process that wait for it, or whose results wait

Part = TypeVar("Part")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Part], Result],
    parts: Iterable[Part],
    processes: int,
    what: str,
    start: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
) -> Iterator[Result]:
    """The results for the parts, in their order. Each process calls `start` first. `what` is for the message.

    Raises JobError if a process is killed.
    """
    # Not fork: this process has threads (gRPC, the job events), and a fork copies their locks in any state.
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_start, initargs=(start, arguments)
    )
    waiting: deque[Future[Result]] = deque()
    try:
        for part in parts:
            waiting.append(pool.submit(work, part))
            if len(waiting) > AHEAD * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise infrastructure_error(
            f"one of {processes} processes that {what} was killed",
            "dropforge tries the run again; if it fails again, use a machine with more memory",
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def cores() -> int:
    """The cores that this container may use: by affinity, and by the control group's share of time."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return available
    return available if quota == "max" else max(1, min(available, int(quota) // int(period)))


def _start(start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start(*arguments)


def _end_with_parent() -> None:
    """End this process when the one that started it was killed: nobody would take its results."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
