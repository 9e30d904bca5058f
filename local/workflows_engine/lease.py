"""The lease on a database: a single engine advances its executions.

Every commit of an engine checks the lease's token. An engine whose token is old must stop.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from .database import Database
from .errors import FailedPrecondition, LeaseLost


class Lease:
    """A row with the owner's token, host and process."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._token = 0
        with db.transaction() as sql:
            sql.execute(
                "CREATE TABLE IF NOT EXISTS wf_lease (id INTEGER PRIMARY KEY CHECK (id = 1), "
                "token INTEGER NOT NULL, host TEXT NOT NULL, process TEXT NOT NULL)"
            )

    def acquire(self, *, takeover: bool) -> None:
        """Become the database's only engine. Raises FailedPrecondition while another process still runs it.

        The process id and its start time show at once that an owner is dead, so that a restart waits for no heartbeat.
        """
        with self._db.transaction() as sql:
            row = sql.execute("SELECT token, host, process FROM wf_lease").fetchone()
            if row is not None and not takeover and _is_other_and_alive(row[1], row[2]):
                raise FailedPrecondition(
                    f"process {row[2].split(':')[0]} on {row[1]} already runs this database's workflows; stop it first"
                )
            self._token = (row[0] if row else 0) + 1
            sql.execute(
                "INSERT OR REPLACE INTO wf_lease (id, token, host, process) VALUES (1, ?, ?, ?)",
                (self._token, socket.gethostname(), _identity(os.getpid())),
            )

    def check(self) -> None:
        """Raise LeaseLost if another engine has taken over. Call this inside the transaction that needs the lease."""
        row = self._db.connection.execute("SELECT token FROM wf_lease").fetchone()
        if row is None or row[0] != self._token:
            raise LeaseLost("another engine has taken over this database")

    def release(self) -> None:
        """Let another process acquire the lease at once."""
        with self._db.transaction() as sql:
            sql.execute("UPDATE wf_lease SET process = '' WHERE token = ?", (self._token,))


def _identity(pid: int) -> str:
    """`PID:START TIME`, which differs from a later process with the same id; no start time outside Linux.

    A killed process whose parent has not waited for it yet (state Z) has no start time: it counts as dead.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        started = "" if state in "ZX" else fields[18]
    except (OSError, ValueError, IndexError):
        started = ""
    return f"{pid}:{started}"


def _is_other_and_alive(host: str, process: str) -> bool:
    pid = process.split(":")[0]
    if host != socket.gethostname() or not pid.isdigit() or int(pid) == os.getpid():
        return False
    if Path("/proc/self/stat").exists():
        return _identity(int(pid)) == process and Path(f"/proc/{pid}").exists()
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
