"""Emulators in processes of their own, which tests kill: forked from a process that has imported their modules.

The imports take a second of processor time, and a test of restarts starts the emulator up to ten times.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
MODULES = (
    "tests.emulators.own_process",
    "tests.emulators.cloudrun.conftest",
    "tests.emulators.kubernetes.conftest",
    "tests.emulators.pubsub.test_recovery",
    "tests.emulators.storage.test_recovery",
)
Ready = Callable[[Any], None]


class OwnProcess:
    """Runs `serve(*arguments, ready)` on an event loop of a new process; `said` is what it gave to `ready`."""

    def __init__(self, serve: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        CONTEXT.set_forkserver_preload(list(MODULES))  # without effect once the process that imports runs
        reading, writing = CONTEXT.Pipe(duplex=False)
        with reading, writing:
            self._process = CONTEXT.Process(target=_run, args=(serve, arguments, writing))
            self._process.start()
            writing.close()  # the end of the process ends the pipe
            self.said = reading.recv()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        """Send SIGKILL, as a crash would end the process, and wait for its end."""
        self._process.kill()
        self._process.join()


def _run(serve: Callable[..., Coroutine[Any, Any, None]], arguments: tuple[Any, ...], pipe: Connection) -> None:
    asyncio.run(serve(*arguments, pipe.send))
