"""The SQLite database that an engine lives in: the embedder's own, or `SqliteDatabase`."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol


class Database(Protocol):
    """One connection, used only on the event loop's thread; no transaction spans an `await`."""

    connection: sqlite3.Connection

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """Commit the statements inside as a unit; an inner transaction joins the outer one."""

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call `callback` after the open transaction has committed, or at once if none is open."""

    async def durable(self, *, alone: bool = False) -> None:
        """Return when every commit so far survives a power cut. `alone`: no other effect waits meanwhile."""


class SqliteDatabase:
    """A database that writes every commit to the disk before it returns; without a path, a database in memory."""

    def __init__(self, path: Path | str = ":memory:") -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA busy_timeout=5000;")
        self._depth = 0
        self._after_commit: list[Callable[[], None]] = []

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        if self._depth:
            yield self.connection
            return
        self.connection.execute("BEGIN IMMEDIATE")
        self._depth = 1
        try:
            yield self.connection
            self.connection.execute("COMMIT")
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
        if self._depth:
            self._after_commit.append(callback)
        else:
            callback()

    async def durable(self, *, alone: bool = False) -> None:
        """A commit with synchronous=FULL is on the disk when it returns."""

    def close(self) -> None:
        self.connection.close()
