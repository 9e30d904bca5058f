"""The local stack's only SQLite file: every emulator's state, so that a restart continues where a killed stack stopped.

One connection, used from the event-loop thread only. A transaction never spans an `await`, so two cannot interleave.

A commit hands its pages to the kernel (WAL, synchronous=NORMAL), so it survives any end of this process. It survives a
power cut once the log is on the disk. `durable` waits for that before any client learns of the commit: one fsync, off
the event loop, serves every caller that waits at that moment. A power cut never leaves half a transaction.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync
Values = Sequence[Any] | Mapping[str, Any]


class Database:
    """A SQLite connection with nestable transactions, after-commit callbacks and group fsync."""

    _open: ClassVar[WeakSet[Database]] = WeakSet()

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
        self._owner = threading.get_ident()
        self._open.add(self)
        self._depth = 0
        self._after_commit: list[Callable[[], None]] = []
        self.on_commit: Callable[[str], None] = lambda moment: None  # a fault switch: crash.py

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit all writes inside the block as one unit; an inner transaction joins the outer transaction."""
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

    def row(self, sql: str, values: Values = ()) -> sqlite3.Row | None:
        """The first row of a query; None without a row."""
        row: sqlite3.Row | None = self.connection.execute(sql, values).fetchone()
        return row

    def rows(self, sql: str, values: Values = ()) -> list[sqlite3.Row]:
        """All rows of a query."""
        return self.connection.execute(sql, values).fetchall()

    def write(self, sql: str, values: Values = ()) -> None:
        """Execute one statement as a transaction, or as a part of the open transaction."""
        with self.transaction() as connection:
            connection.execute(sql, values)

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Run `callback` once the open transaction has committed; at once when no transaction is open."""
        if self._depth:
            self._after_commit.append(callback)
        else:
            callback()

    async def durable(self, *, alone: bool = False) -> None:
        """Return once all commits so far would survive a power cut. Raises OSError.

        `alone`: no other task waits for the event loop, so the fsync runs on it and saves the way to a thread and back.
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
        self._open.discard(self)

    @classmethod
    def close_all_of_this_thread(cls) -> None:
        """Close the databases that this thread has made: SQLite lets no other thread use them."""
        for database in [database for database in cls._open if database._owner == threading.get_ident()]:
            database.close()


def _fsync(log: Path) -> None:
    """Sync through a separate descriptor: SQLite holds no locks on the log, so closing it releases none.

    fdatasync leaves out the times of the file, and so mostly the commit of the file system's journal, as SQLite does.
    """
    try:
        descriptor = os.open(log, os.O_RDWR)
    except FileNotFoundError:  # a database in memory, or a deleted file: nothing to keep
        return
    try:
        _sync_data(descriptor)
    finally:
        os.close(descriptor)
