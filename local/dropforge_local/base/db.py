"""The local stack's one SQLite file: every emulator's state, so that a killed stack goes on where it was.

One connection, used from the event-loop thread only; a transaction never spans an `await`, so two cannot interleave.

A commit hands its pages to the kernel (WAL, synchronous=NORMAL): it outlives this process, however that ends. A power
cut it outlives once the log is on the disk. That is what `durable` waits for, before anybody is told of the commit: one
fsync, off the event loop, for everybody who waits at that moment. No power cut leaves half a transaction behind.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path


class Database:
    """A SQLite connection with nestable transactions, after-commit callbacks and group fsync."""

    def __init__(self, path: Path | str) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.row_factory = sqlite3.Row
        self.connection.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA busy_timeout=5000; PRAGMA foreign_keys=ON;"
        )
        self._log = Path(f"{path}-wal")
        self._commits = self._synced = 0
        self._sync: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fsync")
        self._depth = 0
        self._after_commit: list[Callable[[], None]] = []
        self.on_commit: Callable[[str], None] = lambda moment: None  # a fault switch: crash.py

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what happens inside as one unit; an inner transaction joins the outer one."""
        if self._depth:
            yield self.connection
            return
        self.connection.execute("BEGIN IMMEDIATE")
        self._depth = 1
        changes = self.connection.total_changes
        try:
            yield self.connection
            changed = self.connection.total_changes > changes
            if changed:
                self.on_commit("before")
            self.connection.execute("COMMIT")
            self._commits += 1
            if changed:
                self.on_commit("after")
        except BaseException:
            self._after_commit.clear()
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
        finally:
            self._depth = 0
        callbacks, self._after_commit = self._after_commit, []
        for callback in callbacks:
            callback()

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Run `callback` once the running transaction has committed; at once when there is none."""
        if self._depth:
            self._after_commit.append(callback)
        else:
            callback()

    async def durable(self, *, alone: bool = False) -> None:
        """Return once everything that was committed so far would outlive a power cut. Raises OSError.

        `alone`: nobody else has anything to do meanwhile, so that the way to a thread and back would be lost time.
        """
        wanted = self._commits
        if alone and self._sync is None and self._synced < wanted:
            _fsync(self._log)
            self._synced = wanted
        while self._synced < wanted:
            if self._sync is None:
                self._sync = asyncio.create_task(self._write_through())
            await asyncio.shield(self._sync)

    async def _write_through(self) -> None:
        commits = self._commits
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, _fsync, self._log)
            self._synced = commits
        finally:
            self._sync = None

    def close(self) -> None:
        self._thread.shutdown()
        self.connection.close()


def _fsync(log: Path) -> None:
    """By a descriptor of its own: SQLite keeps no locks on the log, so that closing it here loses none."""
    try:
        descriptor = os.open(log, os.O_RDWR)
    except FileNotFoundError:  # a database in memory, or deleted meanwhile: nothing is left to be kept
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
