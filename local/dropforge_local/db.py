"""The local stack's one SQLite file: every emulator's state, so that a killed stack goes on where it was.

One connection, used from the event-loop thread only; a transaction never spans an `await`, so two cannot interleave.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Database:
    """A SQLite connection with nestable transactions and after-commit callbacks."""

    def __init__(self, path: Path | str) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.row_factory = sqlite3.Row
        self.connection.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA busy_timeout=5000; PRAGMA foreign_keys=ON;"
        )
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

    def close(self) -> None:
        self.connection.close()
